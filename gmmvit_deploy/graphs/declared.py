"""Write and read two metadata entries of a graph's nodes: the role and the attention.

    gmmvit.role         the node's role, to which the precision policy assigns a data type
    gmmvit.attention    the name of the attention that the node belongs to, for nodes from Q Kᵀ to P V

Runtimes ignore these entries. When this package saves, loads or rewrites a graph, the entries do not change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast, get_args

from gmmvit_deploy.errors import ExportError
from gmmvit_deploy.inference.precision import Role

if TYPE_CHECKING:
    import onnx_ir as ir

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
        "Tile",
        "Transpose",
        "Unsqueeze",
    }
)
"""Operators that only move values.  A node with such an operator has the role ``shape`` in every module."""
ROLE_KEY = "gmmvit.role"
ATTENTION_KEY = "gmmvit.attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """An attention in a graph.

    name: of the attention's module, for example ``blocks.0.attention``.
    nodes: the names of its nodes, from the matrix product Q Kᵀ to the matrix product P V.
    mask: the name of the constant matrix that multiplies the scores, or None.
    mixes_heads: a (heads, heads) matrix mixes the heads before or after the softmax.
    normalises_heads: a norm over the heads follows the softmax.
    known: False if the softmax is not between two matrix products; ``nodes`` then contains only the softmax.
    """

    name: str
    nodes: tuple[str, ...]
    mask: str | None = None
    mixes_heads: bool = False
    normalises_heads: bool = False
    known: bool = True


def declare(node: ir.Node, role: Role, *, attention: str | None = None) -> ir.Node:
    """Write the role, and the name of the attention if given, into the node's metadata; return the node."""
    node.metadata_props.pop(ATTENTION_KEY, None)
    node.metadata_props[ROLE_KEY] = role
    if attention:
        node.metadata_props[ATTENTION_KEY] = attention
    return node


def declared_role(node: ir.Node) -> Role | None:
    """Return the role in a node's metadata, or None.  Errors: ExportError when the role is not a known role."""
    role = node.metadata_props.get(ROLE_KEY)
    if role is not None and role not in get_args(Role):
        raise ExportError(f"node {node.name}: expected one of the roles {', '.join(get_args(Role))}, got {role!r}")
    return cast("Role | None", role)


def declared_attention(node: ir.Node) -> str | None:
    """Return the name of the attention in a node's metadata, or None."""
    return node.metadata_props.get(ATTENTION_KEY)
