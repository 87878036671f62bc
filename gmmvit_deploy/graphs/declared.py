"""Roles and attentions as the exporter wrote them into a graph's nodes.

    gmmvit.role         what the node is for, in the words of the precision policy
    gmmvit.attention    the attention that the node is a part of, from Q Kᵀ to P V, by the name of its module

Both are node metadata: a runtime ignores them, and they survive saving, loading and our own rewriting.
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
"""Operators that move values and compute nothing, whatever they are used for."""
ROLE_KEY = "gmmvit.role"
ATTENTION_KEY = "gmmvit.attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """One attention in a graph, by the names of its nodes.

    name: of the module, as ``blocks.0.attention``.  nodes: from Q Kᵀ to P V, both included.
    mask: name of the constant that the scores are multiplied by; None where that is a scalar.
    mixes_heads: products over heads stand before and after its softmax.
    known: False when no products stand around the softmax, and ``nodes`` is that softmax alone.
    """

    name: str
    nodes: tuple[str, ...]
    mask: str | None = None
    mixes_heads: bool = False
    known: bool = True


def declare(node: NodeProto, role: Role, *, attention: str | None = None) -> NodeProto:
    """Write a node's role, and the attention it is a part of, into its metadata; return the node."""
    kept = [(note.key, note.value) for note in node.metadata_props if note.key not in (ROLE_KEY, ATTENTION_KEY)]
    del node.metadata_props[:]
    for key, value in [*kept, (ROLE_KEY, role), *([(ATTENTION_KEY, attention)] if attention else [])]:
        node.metadata_props.add(key=key, value=value)
    return node


def declared_role(node: NodeProto) -> Role | None:
    """The role in a node's metadata, or None.  Errors: ExportError when the policy has no such word."""
    role = _note(node, ROLE_KEY)
    for known in get_args(Role):
        if role == known:
            return known  # type: ignore[no-any-return]  # get_args forgets the type
    if role is not None:
        raise ExportError(f"{node.name}: its declared role is {role!r}, expected one of {', '.join(get_args(Role))}")
    return None


def declared_attention(node: NodeProto) -> str | None:
    """The attention in a node's metadata, or None."""
    return _note(node, ATTENTION_KEY)


def _note(node: NodeProto, key: str) -> str | None:
    return next((note.value for note in node.metadata_props if note.key == key), None)
