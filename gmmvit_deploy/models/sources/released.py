"""Functions for checkpoints of the paper authors' released training code, shared by the families.

The paper is "Toward a Deeper Understanding: RetNet Viewed through Convolution".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gmmvit_deploy.models.sources.hints import LoadHints, OwnHint
from gmmvit_deploy.models.sources.shapes import Shapes, heads_of_preset
from gmmvit_deploy.models.sources.source import CheckpointSource, tensors_of_layers
from gmmvit_deploy.models.specs import MaskSpec


def released_source(
    *,
    signature: tuple[str, ...],
    spec: Callable[[Shapes, LoadHints], Any],
    names: Callable[[Any], dict[str, str]],
    known_unused: Callable[[Any], dict[str, str]],
    absent: tuple[str, ...] = (),
    name: str = "the released code",
    own_hints: tuple[OwnHint, ...] = (),
    option: str = "",
    same_names: Mapping[str, tuple[str, ...]] | None = None,
    shown_heads: Callable[[Shapes, LoadHints], tuple[int | None, str]] | None = None,
) -> CheckpointSource:
    """Return the checkpoint source of a family whose files store every tensor of the model unchanged.

    names: spec → dict from name in the model to name in the released file.
    shown_heads: the function for `heads_of_preset`; None if the tensors of every file show the number of heads.
    The others are fields of `CheckpointSource`. The stored base masks, which a model with the closed form never reads,
    are added to ``known_unused``.
    """

    def unused(model_spec: Any) -> Mapping[str, str]:
        reasons = known_unused(model_spec)
        if not model_spec.mask.closed_form:
            return reasons
        reason = "a stored base; this model was trained with the closed form"
        alphas = [name for name in names(model_spec).values() if name.endswith(".mask.alpha")]
        return reasons | {f"{alpha.removesuffix('.alpha')}.mask": reason for alpha in alphas}

    def taken_from(shapes: Shapes, hints: LoadHints, model_spec: Any) -> Mapping[str, str]:
        return {} if shown_heads is None else heads_of_preset(shapes, hints, shown=shown_heads)

    return CheckpointSource(
        name=name,
        signature=signature,
        absent=absent,
        spec=spec,
        tensors=names,
        known_unused=unused,
        own_hints=own_hints,
        option=option,
        same_names=same_names or {},
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

    mask_at: the name of the mask among the steps before softmax.  projects: whether there is an output projection.
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
