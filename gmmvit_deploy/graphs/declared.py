"""Write and read two metadata entries of a graph's nodes: the role and the attention.

    gmmvit.role         the node's role, to which the precision policy assigns a data type
    gmmvit.attention    the name of the attention that the node belongs to, for nodes from Q Kᵀ to P V

Runtimes ignore these entries. When this package saves, loads or rewrites a graph, the entries do not change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from gmmvit_deploy.errors import ExportError
from gmmvit_deploy.inference.precision import Role

if TYPE_CHECKING:
    from onnx import NodeProto

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


def declare(node: NodeProto, role: Role, *, attention: str | None = None) -> NodeProto:
    """Write the role, and the name of the attention if given, into the node's metadata; return the node."""
    kept = [(note.key, note.value) for note in node.metadata_props if note.key not in (ROLE_KEY, ATTENTION_KEY)]
    del node.metadata_props[:]
    for key, value in [*kept, (ROLE_KEY, role), *([(ATTENTION_KEY, attention)] if attention else [])]:
        node.metadata_props.add(key=key, value=value)
    return node


def declared_role(node: NodeProto) -> Role | None:
    """Return the role in a node's metadata, or None.  Errors: ExportError when the role is not a known role."""
    role = _note(node, ROLE_KEY)
    for known in get_args(Role):
        if role == known:
            return known  # type: ignore[no-any-return]  # get_args forgets the type
    if role is not None:
        raise ExportError(f"node {node.name}: expected one of the roles {', '.join(get_args(Role))}, got {role!r}")
    return None


def declared_attention(node: NodeProto) -> str | None:
    """Return the name of the attention in a node's metadata, or None."""
    return _note(node, ATTENTION_KEY)


def _note(node: NodeProto, key: str) -> str | None:
    return next((note.value for note in node.metadata_props if note.key == key), None)
