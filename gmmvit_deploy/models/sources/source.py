"""`CheckpointSource`: the record of a code base that writes checkpoint files for a model family, with its own names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.models.sources.hints import LoadHints, OwnHint
from gmmvit_deploy.models.sources.record import KnownImages
from gmmvit_deploy.models.sources.shapes import Shapes
from gmmvit_deploy.models.specs import Interpolation

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """Conversion of the tensors ``keys`` of the file, in this order and unchanged, into a tensor of the model."""

    keys: tuple[str, ...]
    convert: Callable[..., Tensor]


HEAD_FILE = "head_file"
"""The prefix under which `checkpoints._model_folder` adds the tensors of a linear head to those of the backbone."""
TensorOrigins = Mapping[str, "str | Conversion"]
"""Name in the model → the key of the file with the same tensor, or the conversion that computes the tensor."""


def origin_keys(origin: str | Conversion) -> tuple[str, ...]:
    return (origin,) if isinstance(origin, str) else origin.keys


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSource:
    """Checkpoint files that a code base writes for a family.

    name:         the name of the code base, for messages, such as ``the released code``
    signature:    regular expressions; a file belongs to this source if each matches the start of the name of a tensor.
                  If several sources recognise a file, the source with the most expressions applies.
    absent:       regular expressions that match the start of no name of a tensor
    spec:         (shapes, hints) → spec of the model; also fills ``shapes.taken_from``. Errors: CheckpointError, for
                  example when neither the tensors nor the user's options show the number of heads, the size or the
                  channels of the images.
    tensors:      (spec, names of the model's tensors) → origin of each of them (`renamed`)
    known_unused: spec → regular expression of a whole key that the network does not read → why a file may contain it;
                  one that begins with ``.+`` is for the modules that the network has
    interpolation: (shapes, hints) → the algorithm with which the code that wrote the file resamples position embeddings
                  for another image size; None if the file does not show the code
    own_hints:    the fields of `OWN_HINTS` that ``spec`` reads; the loader refuses the options of the others
    option:       the value of ``--set source`` that names this source, if any. A file that several sources with options
                  recognise is refused unless the user types ``--set source``
    same_names:   other value of ``--set source`` → regular expressions. The code that the value names writes files with
                  the names of this source, and none of its names matches an expression at its start
    images:       (shapes, hints, spec) → what the file states about the images of training
    present_names: (shapes, hints) → the tensors of a file with older names, under the names of this source, or None if
                  it knows no other names; called only if the tensors of the file do not fit
    """

    name: str
    signature: tuple[str, ...]
    spec: Callable[[Shapes, LoadHints], Any]
    tensors: Callable[[Any, Iterable[str]], TensorOrigins]
    known_unused: Callable[[Any], Mapping[str, str]] = lambda spec: {}
    interpolation: Callable[[Shapes, LoadHints], Interpolation | None] = lambda shapes, hints: None
    images: Callable[[Shapes, LoadHints, Any], KnownImages] = lambda shapes, hints, spec: KnownImages()
    present_names: Callable[[Shapes, LoadHints], Mapping[str, Tensor] | None] = lambda shapes, hints: None
    absent: tuple[str, ...] = ()
    own_hints: tuple[OwnHint, ...] = ()
    option: str = ""
    same_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def recognises(self, names: Iterable[str]) -> bool:
        listed = list(names)
        return not self.missing(listed) and not _any_present(self.absent, listed)

    def missing(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the patterns of ``signature`` that match no name, in readable form, such as ``blocks.*.attn.qkv``."""
        listed = list(names)
        patterns = (pattern for pattern in self.signature if not _present(pattern, listed))
        return tuple(pattern.replace(r"\d+", "*").replace("\\", "").rstrip("$.") for pattern in patterns)

    def is_named(self, option: str, names: Iterable[str]) -> bool:
        """Return whether ``--set source`` with the value ``option`` fits a file of this source with these names."""
        if option in self.same_names:
            return not _any_present(self.same_names[option], list(names))
        return option == self.option


def _present(pattern: str, names: list[str]) -> bool:
    return any(re.match(pattern, name) for name in names)


def _any_present(patterns: Iterable[str], names: list[str]) -> bool:
    return any(_present(pattern, names) for pattern in patterns)


def batched(tensor: Tensor) -> Tensor:
    """Add the dimension of the batch if needed: (N, D)  →  (1, N, D)."""
    return tensor if tensor.dim() == 3 else tensor[None]


BLOCK_OF_TIMM: Mapping[str, str] = {
    "attention_norm": "norm1",
    "attention.qkv": "attn.qkv",
    "attention.out": "attn.proj",
    "mlp_norm": "norm2",
    "mlp.0": "mlp.fc1",
    "mlp.2": "mlp.fc2",
}
"""Layer of a `layers.blocks.Block` → its name in timm, which many codes copied."""


def renamed(names: Iterable[str], table: Mapping[str, str | Conversion]) -> dict[str, str | Conversion]:
    """Return the origin of each tensor of a model, from a table of the names in the model and in the file.

    table: layer or tensor of the model → the same in the file, such as ``blocks.{}.mlp.0`` → ``layers.{}.fc1``, where
    ``{}`` stands for a number. The longest entry that a name begins with applies; the rest of the name, such as
    ``.weight``, is the same in both. A tensor that no entry names gets no origin, which loading reports.
    """
    entries = [
        (re.compile(re.escape(ours).replace(r"\{\}", r"(\d+)") + r"(?=\.|$)"), table[ours])
        for ours in sorted(table, key=len, reverse=True)
    ]
    origins: dict[str, str | Conversion] = {}
    for name in names:
        found = ((match, theirs) for ours, theirs in entries if (match := ours.match(name)))
        for match, theirs in islice(found, 1):
            keys = tuple(key.format(*match.groups()) + name[match.end() :] for key in origin_keys(theirs))
            origins[name] = keys[0] if isinstance(theirs, str) else replace(theirs, keys=keys)
    return origins


def within(ours: str, theirs: str, layers: Mapping[str, str]) -> dict[str, str]:
    """Return a table for `renamed` of the layers of a module: ``ours`` in the model, ``theirs`` in the file."""
    return {f"{ours}.{a}": f"{theirs}.{z}" for a, z in layers.items()}
