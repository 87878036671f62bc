"""Return the role of each node of a graph.  The precision policy assigns a data type to each role.

input        scaling and normalisation of pixels
embedding    the first linear map or convolution, which reads the image
projection   a later linear map: QKV, output projection, MLP, patch merging
depthwise    a convolution that mixes no channels: PiT's pooling, T2T's unfold
product      the matrix products Q Kᵀ and P V, which have no constant input
scale        multiplication by the scalar d^(−1/2), in models whose mask does not contain this factor, or by a number
             for each feature (LayerScale)
mask         elementwise multiplication of the scores S by the mask M
score_bias   addition of a bias B to the scores
softmax      the softmax of the scores, and the softmax over the tokens of external attention
mixing       head mixing: a matrix product with a (heads, heads) matrix (CaiT), or the sums that replace it
norm         LayerNorm: mean, variance, scale and shift; BatchNorm that the exporter did not merge into a convolution;
             the division of a tensor by its sum (external attention)
gelu         GELU
activation   ReLU, the sigmoid σ, SiLU x · σ(x), quick GELU x · σ(1.702 x), and gates: an activation times a tensor
rotation     the products, the negation and the sum that rotate Q and K by the position (rotary position embedding)
bias         addition of the bias of a linear map, or of the position embedding
residual     the sum of a branch and the input of the branch, or of two other tensors that the network computes
pooling      the mean or the sum over tokens, or the maximum
head         the node that outputs the logits, and other linear maps after pooling, which read one vector for each
             image; in a model with token labels also the linear map that computes logits of each token
quantize     QuantizeLinear and DequantizeLinear before a projection
shape        operators that only move values, such as Reshape; padding by zeros; arithmetic on sizes
unknown      a node that no rule matches. In a graph from another exporter, the node computes in float32 in every
             precision. A graph that declares the role unknown exists in float32 only (`require_known_roles`).

The export of this package writes the role into each node's metadata (`declared`). For a graph from another exporter,
`guessed_roles` infers the roles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gmmvit_deploy.errors import ExportError
from gmmvit_deploy.graphs.declared import Attention, declared_attention, declared_role
from gmmvit_deploy.graphs.guessed_roles import guessed_attentions, guessed_roles
from gmmvit_deploy.graphs.wiring import Constants
from gmmvit_deploy.inference.precision import Role

if TYPE_CHECKING:
    import onnx_ir as ir

    from gmmvit_deploy.inference.precision import Precision


def roles_of(graph: ir.Graph) -> dict[ir.Node, Role]:
    """Map each node to its declared role, or to the role that `guessed_roles` infers.

    Errors: ExportError when a declared role is not in the policy.
    """
    roles = {node: role for node in graph if (role := declared_role(node)) is not None}
    return roles if len(roles) == len(graph) else {**guessed_roles(graph), **roles}


def attentions_of(graph: ir.Graph) -> tuple[Attention, ...]:
    """Return the declared attentions, or the inferred attentions if no node declares a role, in the graph's order.

    An attention has ``known=False`` unless nodes before and after its softmax have the role ``product``.
    """
    roles = roles_of(graph)
    if any(declared_role(node) for node in graph):
        parts: dict[str, list[ir.Node]] = {}
        for node in graph:
            if (name := declared_attention(node)) is not None:
                parts.setdefault(name, []).append(node)
        found = list(parts.items())
    else:
        found = guessed_attentions(graph)
    matrices = {value for value, size in Constants(graph).sizes.items() if value is not None and size > 1}
    return tuple(_attention(name, nodes, [roles[node] for node in nodes], matrices) for name, nodes in found)


def _attention(name: str, nodes: list[ir.Node], roles: list[Role], matrices: set[ir.Value]) -> Attention:
    softmaxes = [index for index, role in enumerate(roles) if role == "softmax"]
    if not softmaxes or "product" not in roles[: softmaxes[0]] or "product" not in roles[softmaxes[-1] :]:
        alone = [nodes[index] for index in softmaxes] or nodes
        return Attention(name=name, nodes=tuple(str(node.name) for node in alone), known=False)
    factors = [node for node, role in zip(nodes, roles, strict=True) if role == "mask"]
    return Attention(
        name=name,
        nodes=tuple(str(node.name) for node in nodes),
        mask=next((value.name for node in factors for value in node.inputs if value in matrices), None),
        mixes_heads="mixing" in roles,
        normalises_heads="norm" in roles[softmaxes[-1] :],
    )


def unknown_operators(graph: ir.Graph) -> tuple[str, ...]:
    """Return ``name: operator`` for each node whose role is unknown."""
    roles = roles_of(graph)
    return tuple(f"{node.name}: {node.op_type}" for node in graph if roles[node] == "unknown")


def require_known_roles(graph: ir.Graph, precision: Precision, *, what: str) -> None:
    """Check that no node declares the role ``unknown``: how it behaves in half precision was never checked.

    A graph from another exporter does not declare roles; `cast` leaves its operators without a known role in float32.
    what: the subject of the error, for example the path of the bundle.
    Errors: ExportError that names the first such node and all operators of such nodes, in other precisions than fp32.
    """
    unknown = [node for node in graph if declared_role(node) == "unknown"]
    if precision == "fp32" or not unknown:
        return
    first = unknown[0]
    name = str(first.name)
    if name.rpartition("/")[2].partition(".")[0] != first.op_type:
        name += f" ({first.op_type})"
    operators = ", ".join(dict.fromkeys(node.op_type for node in unknown))
    raise ExportError(
        f"{what}: {precision} needs a known role for each operator; node {name} has none; this model runs in fp32",
        hint=f"remove {precision} from the precisions; operators of this model without a known role: {operators}",
    )
