"""What each node of an exported graph is for: the words in which the precision policy speaks.

input        scaling and normalisation of pixels
embedding    the first linear map or convolution, on the image itself
projection   any later linear map: QKV, output projection, mlp, merging
depthwise    a convolution that mixes no channels: PiT's pooling, T2T's unfold
product      Q Kᵀ and P V: no constant on either side
scale        the scalar d^(−1/2), where there is no mask to hold it
mask         M ∘ S
score_bias   + B on the scores
softmax      its sums and exponentials
mixing       CaiT's products over heads, or what wide heads have in their place
norm         LayerNorm: mean, variance, scale and shift
gelu         GELU
bias         + a constant beside a linear map, or the position embedding
residual     the sum of a branch and what it skipped
pooling      the mean over tokens
head         what is linear behind the mean over tokens, one row an image; last, what gives the logits
quantize     QuantizeLinear and DequantizeLinear around a projection
shape        moves values, computes nothing
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gmmvit_deploy.errors import ExportError
from gmmvit_deploy.graphs.wiring import Wiring

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto

__all__ = ["SHAPE_OPERATORS", "Attention", "Role", "attentions_of", "roles_of"]

Role = Literal[
    "input",
    "embedding",
    "projection",
    "depthwise",
    "product",
    "scale",
    "mask",
    "score_bias",
    "softmax",
    "mixing",
    "norm",
    "gelu",
    "bias",
    "residual",
    "pooling",
    "head",
    "quantize",
    "shape",
]

SHAPE_OPERATORS = frozenset(
    {
        "Concat",
        "Expand",
        "Gather",
        "Identity",
        "Reshape",
        "Shape",
        "Slice",
        "Split",
        "Squeeze",
        "Transpose",
        "Unsqueeze",
    }
)
_DIRECT: dict[str, Role] = {
    "Softmax": "softmax",
    "LayerNormalization": "norm",
    "Gelu": "gelu",
    "ReduceMean": "pooling",
    "ReduceSum": "mixing",
    "Constant": "shape",
    "QuantizeLinear": "quantize",
    "DequantizeLinear": "quantize",
    **dict.fromkeys(SHAPE_OPERATORS, "shape"),
}
_BETWEEN = frozenset({"Add", "Cast", "Mul", "Reshape"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """One attention in a graph, by the names of its nodes.

    name: of the module, as ``blocks.0.attention``.  nodes: from Q Kᵀ to P V, both included.
    mask: name of the constant that the scores are multiplied by; None where that is a scalar.
    mixes_heads: products over heads stand before and after its softmax.
    known: False when no products were found around the softmax, and ``nodes`` is that softmax alone.
    """

    name: str
    nodes: tuple[str, ...]
    mask: str | None = None
    mixes_heads: bool = False
    known: bool = True


def attentions_of(graph: GraphProto, *, strict: bool = True) -> tuple[Attention, ...]:
    """Every softmax with the products around it.

    strict: a softmax that does not stand between two products is an error; otherwise it is reported as unknown.
    Errors: ExportError.
    """
    wiring = Wiring(graph)
    return tuple(_attention(node, wiring, strict=strict) for node in graph.node if node.op_type == "Softmax")


def _attention(softmax: NodeProto, wiring: Wiring, *, strict: bool) -> Attention:
    name = softmax.name.rpartition("/")[0] or softmax.name
    before = _walk(
        wiring.maker.get(softmax.input[0]),
        wiring,
        lambda node: wiring.maker.get(next(iter(wiring.computed_inputs(node)), "")),
    )
    after = _walk(wiring.only_reader(softmax.output[0]), wiring, lambda node: wiring.only_reader(node.output[0]))
    if not before or not after:
        if not strict:
            return Attention(name=name, nodes=(softmax.name,), known=False)
        raise ExportError(f"{softmax.name}: a softmax between two products was wanted, as in attention")
    inside = [*reversed(before), softmax, *after]
    masks = [
        node.input[index]
        for node in before
        if node.op_type == "Mul"
        and (index := wiring.constant_input(node)) is not None
        and wiring.sizes[node.input[index]] > 1
    ]
    return Attention(
        name=name,
        nodes=tuple(node.name for node in inside),
        mask=masks[0] if masks else None,
        mixes_heads=any(wiring.is_mixing(node) for node in inside),
    )


def _walk(node: NodeProto | None, wiring: Wiring, onwards: Callable[[NodeProto], NodeProto | None]) -> list[NodeProto]:
    """The nodes from here to the next product, which is the last of them; none if no product comes."""
    passed: list[NodeProto] = []
    while node is not None:
        passed.append(node)
        if wiring.is_product(node):
            return passed
        if node.op_type not in _BETWEEN and not wiring.is_mixing(node):
            return []
        node = onwards(node)
    return []


def roles_of(graph: GraphProto) -> dict[str, Role]:
    """Node name → role.

    Errors: ExportError on a node whose purpose is not known: its precision would be a guess.
    """
    wiring = Wiring(graph)
    logits = {one.name for one in graph.output}
    inside = {name for attention in attentions_of(graph) for name in attention.nodes}
    image = {one.name for one in graph.input}  # tensors that are the image, or the image moved about
    roles: dict[str, Role] = {}
    for node in graph.node:
        on_image = all(name in image for name in wiring.computed_inputs(node))
        if node.op_type in _DIRECT:
            role = _DIRECT[node.op_type]
        elif logits & set(node.output):
            role = "head"
        elif node.op_type in ("MatMul", "Gemm", "Conv"):
            role = _linear_role(node, wiring, on_image=on_image)
        else:
            role = _elementwise_role(node, wiring, inside=node.name in inside, on_image=on_image)
        roles[node.name] = role
        if on_image and role in ("shape", "input"):
            image.update(node.output)
    return roles


def _linear_role(node: NodeProto, wiring: Wiring, *, on_image: bool) -> Role:
    if wiring.is_product(node):
        return "product"
    if wiring.is_mixing(node):
        return "mixing"
    if next((attribute.i for attribute in node.attribute if attribute.name == "group"), 1) > 1:
        return "depthwise"
    if any(made.op_type == "ReduceMean" for name in node.input if (made := wiring.maker.get(name))):
        return "head"
    return "embedding" if on_image else "projection"


def _elementwise_role(node: NodeProto, wiring: Wiring, *, inside: bool, on_image: bool) -> Role:
    operator, index = node.op_type, wiring.constant_input(node)
    if on_image and operator in ("Cast", "Div", "Sub"):
        return "input"
    if operator == "Cast":
        return "shape"
    if operator == "Mul" and index is not None:
        if wiring.sizes[node.input[index]] == 1:
            return "scale"
        return "mask" if inside else "mixing"
    if operator == "Add":
        if index is None:
            return "residual"
        return "score_bias" if inside else "bias"
    raise ExportError(f"{node.name}: {operator} has no place in the precision policy")
