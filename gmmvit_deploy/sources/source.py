"""A checkpoint source: who writes such files, how they are recognised, and what becomes of each of their tensors.

A source is separate from a family: one family can have several, such as the paper's released code and a library that
trains the same network under other names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.sources.hints import LoadHints
from gmmvit_deploy.sources.shapes import Shapes

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CheckpointSource", "Conversion", "TensorOrigins", "origin_keys"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """One of our tensors, made of tensors of the file that have another form.

    keys: names in the file.  convert: takes their tensors in this order, returns ours; the result's shape and type
    are checked.  It must not change the tensors that it is given.
    """

    keys: tuple[str, ...]
    convert: Callable[..., Tensor]


TensorOrigins = Mapping[str, "str | Conversion"]
"""Name in our model → the key of the file that holds the same tensor, or the conversion that makes it."""


def origin_keys(origin: str | Conversion) -> tuple[str, ...]:
    """Keys of the file that one of our tensors is made of."""
    return (origin,) if isinstance(origin, str) else origin.keys


def _nothing_unused(spec: Any) -> Mapping[str, str]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSource:
    """Files that one code base writes for one family.

    name:         of the code base, for messages, as ``the released code``
    signature:    regular expressions; the file is of this source if each of them matches the start of some tensor's
                  name. Where several sources recognise a file, the one with the most patterns is taken.
    spec:         (shapes, hints) → the model's spec. Errors: CheckpointError, which asks for ``--heads``,
                  ``--image-size`` or ``--channels`` where no tensor tells them.
    tensors:      spec → where each tensor of our model comes from
    known_unused: spec → keys that the file may hold and the network never reads, and why not
    """

    name: str
    signature: tuple[str, ...]
    spec: Callable[[Shapes, LoadHints], Any]
    tensors: Callable[[Any], TensorOrigins]
    known_unused: Callable[[Any], Mapping[str, str]] = field(default=_nothing_unused)

    def recognises(self, names: Iterable[str]) -> bool:
        """Whether every pattern of the signature matches a name."""
        listed = list(names)
        return all(any(re.match(pattern, name) for name in listed) for pattern in self.signature)
