"""Functions for checkpoints of two released training codes, shared by the families.

The paper "Toward a Deeper Understanding: RetNet Viewed through Convolution": masks on the attention scores.
The paper "Vision Transformer for Small-Size Datasets" (arXiv 2112.13492): shifted patch tokenisation (SPT), locality
self-attention (LSA), both, or neither. The plain models of both codes are the same, except T2T; beside the names of
the first code, the second writes

{embedding}.merging.1      LayerNorm (5·c·m²), where m is the side of a patch and c the number of channels: SPT
{embedding}.merging.2      linear layer (D, 5·c·m²): SPT
{attention}.scale          (H), the temperature of each head: LSA
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gmmvit_deploy.models.sources.hints import LoadHints, OwnHint
from gmmvit_deploy.models.sources.shapes import Shapes
from gmmvit_deploy.models.sources.source import CheckpointSource, TensorOrigins, within

OPTION = "spt-lsa"
"""The value of ``--set source`` for files of the released code of SPT and LSA."""
PLAIN_FILES: Mapping[str, tuple[str, ...]] = {OPTION: (r"mask$", r".*\.mask\.(alpha|sigma|mask)$")}
"""`CheckpointSource.same_names`: files without masks, which the code of SPT and LSA can have written.

Only the code of the masks writes the masks of the attentions, and ``mask`` at the root of the file.
"""
VIEWS = 5  # the image and four shifted copies


_ROOT_MASK = {"mask": "a second copy of the base mask, at the root of the file"}


def released_source(
    *,
    signature: tuple[str, ...],
    spec: Callable[[Shapes, LoadHints], Any],
    names: Callable[[Any, Iterable[str]], TensorOrigins],
    known_unused: Mapping[str, str] = _ROOT_MASK,
    absent: tuple[str, ...] = (),
    own_hints: tuple[OwnHint, ...] = (),
    same_names: Mapping[str, tuple[str, ...]] = PLAIN_FILES,
) -> CheckpointSource:
    """Return the checkpoint source of both codes for a family; its files store every tensor of the model unchanged.

    names: `CheckpointSource.tensors`.
    known_unused: the keys that the network of no spec reads.
    The others are fields of `CheckpointSource`; a model with the closed form also ignores the stored base masks. Files
    of the code of SPT and LSA have no unused tensors.
    """

    def unused(model_spec: Any) -> Mapping[str, str]:
        if getattr(model_spec, "spt", False) or getattr(model_spec, "lsa", False):
            return {}
        if not model_spec.mask.closed_form:
            return known_unused
        return {**known_unused, r".+\.mask\.mask": "a stored base; this model was trained with the closed form"}

    return CheckpointSource(
        name="the released code",
        signature=signature,
        absent=absent,
        spec=spec,
        tensors=names,
        known_unused=unused,
        own_hints=own_hints,
        same_names=same_names,
    )


def score_names(ours: str, theirs: str, *, mask: str = "mask") -> dict[str, str]:
    """Return a table for `renamed` of the mask and the temperature of an attention.

    mask: the name of the mask among the steps before softmax.
    """
    steps = {
        mask: "mask",
        f"{mask}.base": "mask.mask",
        f"{mask}.weight": "mask.mask",
        "temperature.temperature": "scale",
    }
    return within(f"{ours}.scores.before", theirs, steps)


def block_names(ours: str, theirs: str, *, mask: str = "mask") -> dict[str, str]:
    """Return a table for `renamed` of a ViT or PiT block.  mask: as in `score_names`."""
    layers = {
        "attention_norm": "0.norm",
        "attention.qkv": "0.fn.to_qkv",
        "attention.out": "0.fn.to_out.0",
        "mlp_norm": "1.norm",
        "mlp.0": "1.fn.net.0",
        "mlp.2": "1.fn.net.3",
    }
    return within(ours, theirs, layers) | score_names(f"{ours}.attention", f"{theirs}.0.fn", mask=mask)


SHIFTED_NAMES = {"norm": "1", "project": "2"}
"""Layer of a `ShiftedPatches` → its name in a file, within ``merging``."""


def patch_sizes(shapes: Shapes, shifted: str, *, linear: str = "", convolution: str = "") -> tuple[int, int, int, bool]:
    """Return (D, side of a patch, image channels, whether the file has shifted patch tokenisation).

    shifted: the prefix of its layers.  linear, convolution: the layer of a file without it.
    """
    if any(name.startswith(f"{shifted}.") for name in shapes.tensors):
        return *shapes.linear_patch(f"{shifted}.2.weight", views=VIEWS), True
    plain = shapes.linear_patch(f"{linear}.weight") if linear else shapes.convolution_patch(f"{convolution}.weight")
    return *plain, False


def temperature_heads(shapes: Shapes, name: str, *, pattern: str) -> int | None:
    """Return the number of LSA's temperatures in the named tensor, or None if no name of the file fits ``pattern``."""
    return shapes.of(name, rank=1)[0] if any(re.match(pattern, key) for key in shapes.tensors) else None
