"""A checkpoint source: the code base that writes the files, how to recognise them, and how to map their tensors.

A source is separate from a family: a family can have several sources, such as the paper's released code and a library
that trains the same network under other names.
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
    """Conversion of tensors of the file into a tensor of the model.

    keys: the names of the tensors in the file.  convert: a function that takes these tensors in this order and returns
    the tensor of the model, whose shape and data type are checked afterwards.  The function
    must not modify its arguments.
    """

    keys: tuple[str, ...]
    convert: Callable[..., Tensor]


TensorOrigins = Mapping[str, "str | Conversion"]
"""Name in the model → the key of the file with the same tensor, or the conversion that computes the tensor."""


def origin_keys(origin: str | Conversion) -> tuple[str, ...]:
    """Return the keys of the file from which a tensor of the model is computed."""
    return (origin,) if isinstance(origin, str) else origin.keys


def _nothing_unused(spec: Any) -> Mapping[str, str]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSource:
    """Checkpoint files that a code base writes for a family.

    name:         the name of the code base, for messages, such as ``the released code``
    signature:    regular expressions; a file belongs to this source if each of them matches the start of some tensor's
                  name. If several sources recognise a file, the source with the most patterns applies.
    spec:         (shapes, hints) → the model's spec. Errors: CheckpointError, which asks for ``--heads``,
                  ``--image-size`` or ``--channels`` where the tensors do not determine these values.
    tensors:      spec → the origin of each tensor of the model
    known_unused: spec → dict from each key that the file may contain but the network never reads to the reason
    """

    name: str
    signature: tuple[str, ...]
    spec: Callable[[Shapes, LoadHints], Any]
    tensors: Callable[[Any], TensorOrigins]
    known_unused: Callable[[Any], Mapping[str, str]] = field(default=_nothing_unused)

    def recognises(self, names: Iterable[str]) -> bool:
        """Return whether every pattern of the signature matches the start of a name."""
        listed = list(names)
        return all(any(re.match(pattern, name) for name in listed) for pattern in self.signature)
