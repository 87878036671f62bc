"""What no tensor of a DeepViT checkpoint shows: from an option, or from the preset that the file names.

scale adjustment, transform scale; the number of heads, if no block has re-attention

A wrong value raises no error, but gives other logits.

The authors' code builds a network without re-attention in two ways, whose files have the same tensors:
re_atten=False, which ignores the scale adjustment; or re_atten=True with apply_transform=False for every block, which
applies the scale adjustment. In every preset, some blocks have re-attention, so the user is asked for the value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gmmvit_deploy.errors import CheckpointError
from gmmvit_deploy.models.families.deepvit.presets import IMAGE_SIZES, PRESETS
from gmmvit_deploy.models.families.deepvit.spec import DeepViTSpec
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.models.sources.record import KnownImages
from gmmvit_deploy.models.sources.recorded_preset import RecordedPreset, recorded_preset
from gmmvit_deploy.models.sources.shapes import Shapes, field_differences
from gmmvit_deploy.models.specs import MaskSpec

__all__ = ["HiddenValues", "hidden_values", "known_images"]

_HIDDEN = {"heads", "scale_adjustment", "transform_scale"}
_NOT_COMPARED = {"classes", "mask", *_HIDDEN}
"""Fields of a spec that are no sizes of a preset: a network is often trained again for other classes."""
_SETTINGS = ("mean", "std", "crop_pct", "interpolation")


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenValues:
    """Values that no tensor shows.

    heads: the number of heads, or None if neither an option nor a preset states it.
    taken_from: field → where the value comes from, for values of a preset.
    """

    heads: int | None
    scale_adjustment: float
    transform_scale: bool
    taken_from: Mapping[str, str]


def hidden_values(shapes: Shapes, hints: LoadHints, spec: DeepViTSpec, *, known_heads: int | None) -> HiddenValues:
    """Return the values that no tensor shows.

    spec: the sizes that the tensors show; the values that no tensor shows are not read.
    known_heads: the number of heads that the tensors show, or None.
    Errors: CheckpointError when a value is missing, with the options to type, or when ``--set transform_scale=yes`` or
    ``--set transform_scale=no`` is given for a file without re-attention.
    """
    mixes = any(spec.reattention)
    if hints.transform_scale is not None and not mixes:
        option = "--set transform_scale=yes" if hints.transform_scale else "--set transform_scale=no"
        does = "multiplies" if hints.transform_scale else "keeps"
        raise CheckpointError(
            f"{shapes.source}: {option} {does} the mixed weights, but no block of this file mixes heads",
            hint=f"omit {option}",
        )
    preset, why_not = _usable_preset(shapes, hints, spec, known_heads)
    given: dict[str, Any] = {
        "heads": known_heads if known_heads is not None else hints.heads,
        "scale_adjustment": hints.scale_adjustment,
        "transform_scale": hints.transform_scale if mixes else False,
    }
    missing = [field for field, value in given.items() if value is None]
    if missing and preset is None:
        raise _asked(shapes, missing, why_not, mixes=mixes)
    values = given if preset is None else given | {field: getattr(preset.spec, field) for field in missing}
    return HiddenValues(
        heads=values["heads"],
        scale_adjustment=float(values["scale_adjustment"]),
        transform_scale=bool(values["transform_scale"]),
        taken_from={} if preset is None else dict.fromkeys(missing, preset.origin),
    )


def _asked(shapes: Shapes, missing: list[str], why_not: str, *, mixes: bool) -> CheckpointError:
    words = {
        "heads": "the number of heads",
        "scale_adjustment": "the scale adjustment",
        "transform_scale": "the transform scale",
    }
    options = {
        "heads": "--set heads=N",
        "scale_adjustment": "--set scale_adjustment=NUMBER (in the presets 1, but 0.5 in deepvit_S and deepvit_L)"
        if mixes
        else "--set scale_adjustment=NUMBER (1 if training built the network with re_atten=False, because the authors' "
        "code then ignores the value of the training)",
        "transform_scale": "--set transform_scale=yes (as in deepvit_S) or --set transform_scale=no (as in the other "
        "presets)",
    }
    return CheckpointError(
        f"{shapes.source}: no tensor of this file shows {' and '.join(words[field] for field in missing)} of a "
        f"DeepViT{why_not}",
        hint=f"type {' and '.join(options[field] for field in missing)} with the values of the training; a wrong value "
        "raises no error, but the predictions are wrong",
    )


def _usable_preset(
    shapes: Shapes, hints: LoadHints, spec: DeepViTSpec, known_heads: int | None
) -> tuple[RecordedPreset[DeepViTSpec] | None, str]:
    """Return the preset of ``--preset``, or the preset that the file names if its sizes equal those of the file.

    The second value says why the preset that the file names is not used, or is empty.
    """
    if hints.preset is not None:
        chosen = PRESETS[hints.preset](spec.classes, spec.image_size, MaskSpec())
        origin = f"the preset {hints.preset}, which --preset names"
        return RecordedPreset(name=hints.preset, spec=chosen, origin=origin), ""

    def preset_named(name: str) -> DeepViTSpec | None:
        return PRESETS[name](spec.classes, IMAGE_SIZES[name], MaskSpec()) if name in PRESETS else None

    def differences(preset: DeepViTSpec) -> list[str]:
        differing = list(map(_short, field_differences(spec, preset, left_out=_NOT_COMPARED)))
        if known_heads is not None and known_heads != preset.heads:
            differing.append(f"heads {known_heads} (the preset has {preset.heads})")
        return differing

    return recorded_preset(shapes, preset_named=preset_named, differences=differences)


def _short(difference: str) -> str:
    """Shorten the list of blocks in a difference."""
    return "re-attention in other blocks" if difference.startswith("reattention") else difference


def known_images(shapes: Shapes, hints: LoadHints, spec: DeepViTSpec) -> KnownImages:
    """Return the preprocessing of the preset that the file names, if training did not set another preprocessing.

    Source: ``default_cfgs`` of the authors' code, which its train.py uses if mean, std, crop and filter are not given.
    """
    preset, _ = _usable_preset(shapes, replace(hints, preset=None), spec, spec.heads)
    if preset is None or not shapes.record.args or any(shapes.record.args.get(name) for name in _SETTINGS):
        return KnownImages()
    half = (0.5,) * spec.channels
    return KnownImages(
        mean=half,
        std=half,
        resize="center-bicubic",
        crop_pct=1.0 if IMAGE_SIZES[preset.name] == 384 else 0.9,
        origins=dict.fromkeys(("mean", "std", "resize", "crop_pct"), preset.origin),
    )
