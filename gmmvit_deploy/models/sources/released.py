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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gmmvit_deploy.models.sources.hints import LoadHints, OwnHint
from gmmvit_deploy.models.sources.shapes import Shapes
from gmmvit_deploy.models.sources.source import CheckpointSource, tensors_of_layers
from gmmvit_deploy.models.specs import MaskSpec

OPTION = "spt-lsa"
"""The value of ``--set source`` for files of the released code of SPT and LSA."""
PLAIN_FILES: Mapping[str, tuple[str, ...]] = {OPTION: (r"mask$", r".*\.mask\.(alpha|sigma|mask)$")}
"""`CheckpointSource.same_names`: files without masks, which the code of SPT and LSA can have written.

Only the code of the masks writes the masks of the attentions, and ``mask`` at the root of the file.
"""
VIEWS = 5  # the image and four shifted copies


def released_source(
    *,
    signature: tuple[str, ...],
    spec: Callable[[Shapes, LoadHints], Any],
    names: Callable[[Any], dict[str, str]],
    known_unused: Callable[[Any], dict[str, str]] = lambda spec: {
        "mask": "a second copy of the base mask, at the root of the file"
    },
    absent: tuple[str, ...] = (),
    own_hints: tuple[OwnHint, ...] = (),
    same_names: Mapping[str, tuple[str, ...]] = PLAIN_FILES,
    shown_heads: Callable[[Shapes, LoadHints], tuple[int | None, str]] | None = None,
) -> CheckpointSource:
    """Return the checkpoint source of both codes for a family; its files store every tensor of the model unchanged.

    names: spec → name in the model → name in the released file.
    shown_heads: (shapes, hints) → the number of heads that the tensors show, or None, and the evidence for
    `infer_heads`; None if the tensors of every file show the number of heads.
    The others are fields of `CheckpointSource`; a model with the closed form also ignores the stored base masks. Files
    of the code of SPT and LSA have no unused tensors.
    """

    def unused(model_spec: Any) -> Mapping[str, str]:
        if getattr(model_spec, "spt", False) or getattr(model_spec, "lsa", False):
            return {}
        reasons = known_unused(model_spec)
        if not model_spec.mask.closed_form:
            return reasons
        reason = "a stored base; this model was trained with the closed form"
        alphas = [name for name in names(model_spec).values() if name.endswith(".mask.alpha")]
        return reasons | {f"{alpha.removesuffix('.alpha')}.mask": reason for alpha in alphas}

    def taken_from(shapes: Shapes, hints: LoadHints, model_spec: Any) -> Mapping[str, str]:
        if shown_heads is None or hints.preset is None or shown_heads(shapes, hints)[0] is not None:
            return {}
        return {"heads": f"--preset {hints.preset}"}

    return CheckpointSource(
        name="the released code",
        signature=signature,
        absent=absent,
        spec=spec,
        tensors=names,
        known_unused=unused,
        own_hints=own_hints,
        same_names=same_names,
        taken_from=taken_from,
    )


def mask_names(mask: MaskSpec, ours: str, theirs: str) -> dict[str, str]:
    """Return name in the model → name in the released file, for the tensors of a mask."""
    if mask.kind == "elm":
        return {f"{ours}.weight": f"{theirs}.mask"}
    if mask.kind == "plain":
        return {}
    names = {f"{ours}.{part}": f"{theirs}.{part}" for part in ("alpha", "sigma")}
    return names if mask.closed_form else {**names, f"{ours}.base": f"{theirs}.mask"}


def block_names(
    ours: str, theirs: str, *, mask: MaskSpec, mask_at: str = "mask", projects: bool = True
) -> dict[str, str]:
    """Return name in the model → name in the released file, for the tensors of a ViT or PiT block.

    mask_at: the name of the mask among the steps before softmax.
    """
    pairs = {
        "attention_norm": "0.norm",
        "mlp_norm": "1.norm",
        "mlp.0": "1.fn.net.0",
        "mlp.2": "1.fn.net.3",
        **({"attention.out": "0.fn.to_out.0"} if projects else {}),
    }
    names = tensors_of_layers({f"{ours}.{a}": f"{theirs}.{b}" for a, b in pairs.items()})
    names[f"{ours}.attention.qkv.weight"] = f"{theirs}.0.fn.to_qkv.weight"
    return names | mask_names(mask, f"{ours}.attention.scores.before.{mask_at}", f"{theirs}.0.fn.mask")


def shifted_names(ours: str, theirs: str) -> dict[str, str]:
    """Return name in the model → name in the file, for the tensors of a `ShiftedPatches`."""
    return tensors_of_layers({f"{ours}.norm": f"{theirs}.1", f"{ours}.project": f"{theirs}.2"})


def has_shifted(shapes: Shapes, prefix: str) -> bool:
    """Return whether the file has tensors of shifted patch tokenisation.  prefix: ``to_patch_embedding.merging``."""
    return any(name.startswith(f"{prefix}.") for name in shapes.tensors)


def temperature_heads(shapes: Shapes, names: Sequence[str], *, pattern: str) -> tuple[int, ...] | None:
    """Return the number of LSA's temperatures in each named tensor, or None if no name of the file fits ``pattern``."""
    if not any(re.match(pattern, name) for name in shapes.tensors):
        return None
    return tuple(shapes.of(name, rank=1)[0] for name in names)
