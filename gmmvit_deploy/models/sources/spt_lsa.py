"""Functions for checkpoints of the released code of SPT and LSA, shared by the families.

The paper is "Vision Transformer for Small-Size Datasets" (arXiv 2112.13492). Its code trains with shifted patch
tokenisation (SPT), with locality self-attention (LSA), with both, or with neither. The plain models of both codes are
the same, except T2T. The names of the other tensors are those of `sources.released`.

{embedding}.merging.1      LayerNorm (5·c·m²), where m is the side of a patch and c the number of channels: SPT
{embedding}.merging.2      linear layer (D, 5·c·m²): SPT
{attention}.scale          (H), the temperature of each head: LSA
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from gmmvit_deploy.models.sources.hints import LoadHints, OwnHint
from gmmvit_deploy.models.sources.released import released_source
from gmmvit_deploy.models.sources.shapes import Shapes
from gmmvit_deploy.models.sources.source import CheckpointSource, tensors_of_layers

OPTION = "spt-lsa"
"""The value of ``--set source`` for files of the released code of SPT and LSA."""
PLAIN_FILES = {OPTION: (r"mask$", r".*\.mask\.(alpha|sigma|mask)$")}
"""`CheckpointSource.same_names` of a source whose plain files the code of SPT and LSA can also have written.

Only the code of the masks writes the masks of the attentions, and ``mask`` at the root of the file.
"""
VIEWS = 5  # the image and four shifted copies


def spt_lsa_source(
    *,
    signature: tuple[str, ...],
    either: tuple[str, ...],
    spec: Callable[[Shapes, LoadHints], Any],
    names: Callable[[Any], dict[str, str]],
    own_hints: tuple[OwnHint, ...] = (),
    shown_heads: Callable[[Shapes, LoadHints], tuple[int | None, str]] | None = None,
) -> CheckpointSource:
    """Return the source of files with SPT, with LSA, or with both.

    signature: the expressions of the source of files without both.
    either: expressions for keys that only SPT or only LSA writes; at least one must match.
    The others are those of `released_source`.
    """
    return released_source(
        name="the released code of SPT and LSA",
        signature=(*signature, f"({'|'.join(either)})"),
        spec=spec,
        names=names,
        known_unused=lambda _: {},
        own_hints=own_hints,
        option=OPTION,
        shown_heads=shown_heads,
    )


def shifted_patch(shapes: Shapes, prefix: str) -> tuple[int, int, int]:
    """Return (width, side of a patch in pixels, channels of the images) for shifted patch tokenisation.

    prefix: of the names, such as ``to_patch_embedding.merging``.
    Errors: CheckpointError when the linear layer is missing, or when its input width does not fit.
    """
    name = f"{prefix}.2.weight"
    side, channels = shapes.linear_patch(name, views=VIEWS)
    return shapes.of(name, rank=2)[0], side, channels


def shifted_names(ours: str, theirs: str) -> dict[str, str]:
    """Return a dict from name in the model to name in the file, for the tensors of a `ShiftedPatches`.

    ours, theirs: the name of the module in the model, and the start of its names in the file.
    """
    return tensors_of_layers({f"{ours}.norm": f"{theirs}.1", f"{ours}.project": f"{theirs}.2"})


def has_shifted(shapes: Shapes, prefix: str) -> bool:
    """Return whether the file has tensors of shifted patch tokenisation.  prefix: as for `shifted_patch`."""
    return any(name.startswith(f"{prefix}.") for name in shapes.tensors)


def temperature_heads(shapes: Shapes, names: Sequence[str], *, pattern: str) -> tuple[int, ...] | None:
    """Return the number of LSA's temperatures in each named tensor, or None if the file has no temperatures.

    pattern: a regular expression for the start of the names of all temperatures.
    Errors: CheckpointError when the file has temperatures, but a named tensor is missing or is not (H).
    """
    if not any(re.match(pattern, name) for name in shapes.tensors):
        return None
    return tuple(shapes.of(name, rank=1)[0] for name in names)
