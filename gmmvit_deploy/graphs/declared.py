"""Write and read the roles and attentions that a graph's nodes declare.

    gmmvit.role         the node's role in the precision policy
    gmmvit.attention    the attention that the node belongs to, from Q Kᵀ to P V, by the name of its module

Both are node metadata: runtimes ignore them, and they are kept when a graph is saved, loaded or rewritten by us.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from gmmvit_deploy.errors import ExportError
from gmmvit_deploy.precision import Role

if TYPE_CHECKING:
    from onnx import NodeProto

__all__ = [
    "ATTENTION_KEY",
    "ROLE_KEY",
    "SHAPE_OPERATORS",
    "Attention",
    "declare",
    "declared_attention",
    "declared_role",
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
"""Operators that move values and compute nothing, wherever they occur."""
ROLE_KEY = "gmmvit.role"
ATTENTION_KEY = "gmmvit.attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """An attention in a graph.

    name: of its module, as ``blocks.0.attention``.  nodes: names of its nodes, from Q Kᵀ to P V, both included.
    mask: name of the constant that multiplies the scores; None if the constant is a scalar.
    mixes_heads: it has products over heads around its softmax.
    known: False if its softmax is not between two products; ``nodes`` is then the softmax alone.
    """

    name: str
    nodes: tuple[str, ...]
    mask: str | None = None
    mixes_heads: bool = False
    known: bool = True


def declare(node: NodeProto, role: Role, *, attention: str | None = None) -> NodeProto:
    """Write a node's role, and the attention that it belongs to, into its metadata; return the node."""
    kept = [(note.key, note.value) for note in node.metadata_props if note.key not in (ROLE_KEY, ATTENTION_KEY)]
    del node.metadata_props[:]
    for key, value in [*kept, (ROLE_KEY, role), *([(ATTENTION_KEY, attention)] if attention else [])]:
        node.metadata_props.add(key=key, value=value)
    return node


def declared_role(node: NodeProto) -> Role | None:
    """Return the role in a node's metadata, or None.  Errors: ExportError when it is not a role of the policy."""
    role = _note(node, ROLE_KEY)
    for known in get_args(Role):
        if role == known:
            return known  # type: ignore[no-any-return]  # get_args forgets the type
    if role is not None:
        raise ExportError(f"{node.name}: its declared role is {role!r}, expected one of {', '.join(get_args(Role))}")
    return None


def declared_attention(node: NodeProto) -> str | None:
    """Return the attention in a node's metadata, or None."""
    return _note(node, ATTENTION_KEY)


def _note(node: NodeProto, key: str) -> str | None:
    return next((note.value for note in node.metadata_props if note.key == key), None)
