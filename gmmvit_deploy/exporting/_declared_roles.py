"""Name the nodes of an exported graph after their modules, and declare the role and the attention of each node.

A role says what an operator is for. The precision policy assigns a data type to each role
(`gmmvit_deploy.graphs.roles`). The exporter records the module and the PyTorch operator of each node in the node's
metadata. The module declares the role of this operator (`gmmvit_deploy.models.layers.roles`), so no role is inferred
from the graph. A node that only moves values always has the role ``shape``.
"""

from __future__ import annotations

import ast
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from gmmvit_deploy.errors import ExportError
from gmmvit_deploy.graphs.declared import SHAPE_OPERATORS, declare
from gmmvit_deploy.graphs.guessed_roles import guessed_attentions, guessed_roles
from gmmvit_deploy.graphs.roles import attentions_of
from gmmvit_deploy.inference.precision import Role
from gmmvit_deploy.models.layers.attention import attentions_without_scores
from gmmvit_deploy.models.layers.roles import layer_role, operator_role
from gmmvit_deploy.models.scores.attention import AttentionScores
from gmmvit_deploy.models.scores.step import Step

if TYPE_CHECKING:
    import onnx_ir as ir

_PIXELS = "model"  # the attribute of `PixelInput` that holds the network
_ATTENDING: tuple[Role, ...] = ("product", "softmax")
"""A node of an attention module belongs to the attention if the node has one of these roles.  Projections do not."""


class _Origin(NamedTuple):
    """The path of the module, and the PyTorch operator (``add`` for ``aten.add``), that a node was exported from."""

    module: str
    operator: str


def _origin(node: ir.Node) -> _Origin | None:
    """Read a node's origin from the node's metadata; return None for a node that the exporter's optimiser added."""
    scopes = ast.literal_eval(node.metadata_props.get("pkg.torch.onnx.name_scopes", "[]"))
    classes = ast.literal_eval(node.metadata_props.get("pkg.torch.onnx.class_hierarchy", "[]"))
    if len(scopes) < 2 or not classes:
        return None
    _, _, target = str(classes[-1]).partition(".")
    return _Origin(str(scopes[-2]), target.partition(".")[0])


def name_nodes(model: ir.Model) -> None:
    """Name every node after its module, for example ``blocks.0.attention/Softmax``.

    The lists of layers that engines report contain these names.
    """
    taken: Counter[str] = Counter()
    for node in model.graph:
        origin = _origin(node)
        name = f"{_in_network(origin.module) if origin else 'model'}/{node.op_type}"
        node.name = f"{name}.{taken[name]}" if taken[name] else name
        taken[name] += 1


def _in_network(path: str) -> str:
    """Return a module's path in the network, without the wrapper `PixelInput`.  The network itself is ``model``."""
    return path.removeprefix(_PIXELS).removeprefix(".") or "model"


def declare_roles(model: ir.Model, exported: nn.Module, *, foreign: bool = False) -> None:
    """Write the role of every node, and the attention that the node belongs to, into the node's metadata.

    exported: the module that the graph was exported from.
    foreign: True if another package defines the network, in which only the answered attentions declare their roles;
    the other roles, which can be ``unknown``, and the other attentions are those of `graphs.guessed_roles`.
    Errors: ExportError that lists the nodes without a role, or the attentions without a matrix product before and after
    the softmax.
    """
    attentions, external = _attentions(exported), attentions_without_scores(exported)
    guessed = guessed_roles(model.graph) if foreign else {}
    inferred = _inferred_attentions(model, attentions) if foreign else {}
    missing = []
    for node in model.graph:
        origin = _origin(node)
        role = _role(node, origin, exported) or guessed.get(node)
        if role is None:
            missing.append(f"{node.name}: {_missing(origin, exported)}")
        else:
            declare(node, role, attention=_attention(role, origin, attentions, external) or inferred.get(node))
    if missing:
        raise ExportError(
            "expected a declared role (what the operator is for, such as softmax) for each operator; these "
            f"{len(missing)} operators have no role:" + "".join(f"\n  {line}" for line in missing),
            hint="in the Python class of the module, wrap the layer in with_role(layer, role) where the class creates "
            "the layer, or add an entry to operator_roles of the class",
        )
    _require_products(model, without={_in_network(path) for path in external})


def _inferred_attentions(model: ir.Model, answered: dict[str, AttentionScores]) -> dict[ir.Node, str]:
    """Map nodes to the name of their attention where no `AttentionScores` computes it, as in CaiT's talking heads."""
    paths = {_in_network(path) for path in answered}
    return {
        node: name
        for name, nodes in guessed_attentions(model.graph)
        if len(nodes) > 1 and name not in paths
        for node in nodes
    }


def _require_products(model: ir.Model, *, without: set[str]) -> None:
    """Errors: ExportError when an attention, but those of ``without``, lacks a matrix product around its softmax."""
    broken = [
        attention for attention in attentions_of(model.graph) if not attention.known and attention.name not in without
    ]
    if broken:
        raise ExportError(
            f"expected each attention to declare a matrix product, a softmax and a matrix product; {len(broken)} "
            "attentions declare other roles:"
            + "".join(f"\n  {attention.name} declares {', '.join(attention.nodes)}" for attention in broken),
            hint="in the Python class whose instances hold the AttentionScores module, add entries for the matrix "
            "products and the softmax to operator_roles",
        )


def _role(node: ir.Node, origin: _Origin | None, exported: nn.Module) -> Role | None:
    if node.op_type in SHAPE_OPERATORS or node.op_type == "Constant":
        return "shape"
    if origin is None:
        return None
    module = exported.get_submodule(origin.module)
    role = layer_role(module)
    if role is None:
        return operator_role(module, origin.operator)
    # The Add node of a linear map or a convolution adds the bias. In a step on the scores, every node has the role of
    # the step.
    return "bias" if node.op_type == "Add" and not isinstance(module, Step) else role


def _missing(origin: _Origin | None, exported: nn.Module) -> str:
    if origin is None:
        return "the exporter added this node, which belongs to no module"
    kind = type(exported.get_submodule(origin.module)).__name__
    return f"{kind} declares no role for {origin.operator}"


def _attentions(exported: nn.Module) -> dict[str, AttentionScores]:
    """Map the path of each module that contains an `AttentionScores` to that `AttentionScores`."""
    return {
        path.rpartition(".")[0]: module
        for path, module in exported.named_modules()
        if isinstance(module, AttentionScores)
    }


def _attention(
    role: Role, origin: _Origin | None, attentions: dict[str, AttentionScores], external: tuple[str, ...]
) -> str | None:
    """Return the name of the attention that a node belongs to, from Q Kᵀ to P V without a step that scales Q; or None.

    external: the attentions without Q Kᵀ, to which all nodes of their modules belong.
    """
    if origin is None:
        return None
    if origin.module in external:
        return _in_network(origin.module)
    for path, scores in attentions.items():
        inside = origin.module.removeprefix(f"{path}.scores") if origin.module.startswith(f"{path}.scores") else None
        if origin.module == path or inside == "":
            return _in_network(path) if role in _ATTENDING else None
        if inside and inside.startswith("."):
            step = scores.get_submodule(".".join(inside.split(".")[1:3]))
            on_query = isinstance(step, Step) and step.scales_query
            return None if on_query else _in_network(path)
    return None
