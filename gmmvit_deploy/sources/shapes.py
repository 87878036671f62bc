"""Infer a spec from the names and shapes of tensors: functions shared by all families.

Shapes determine almost every field. The number of heads follows only from per-head masks, position bias tables and
mixing matrices. Where these tensors are absent, the user must give the number of heads: a model with a wrong number of
heads loads without an error and computes wrong predictions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from gmmvit_deploy.errors import CheckpointError
from gmmvit_deploy.sources.hints import LoadHints
from gmmvit_deploy.sources.record import TrainingRecord
from gmmvit_deploy.specs import CHANNELS, MaskSpec, ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Shapes",
    "asked_image",
    "check_image_hints",
    "compared_with_preset",
    "exact_root",
    "infer_heads",
    "infer_mask",
    "mask_heads",
    "preset_of",
]

SpecT = TypeVar("SpecT", bound=ModelSpec)
_RELEASED_CHANNELS = 3
_CONFIGURED_SIZES = (32, 64)  # the image sizes for which the released code has a patch size


class Shapes:
    """The shapes of a file's tensors by name, with errors that state the expected shape.

    source: the name of the file, for messages.  channels: the number of image channels from the user, or None.
    record: the plain values that the training script stored beside the tensors; empty if not given.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        source: str,
        *,
        channels: int | None = None,
        record: TrainingRecord | None = None,
    ) -> None:
        self.tensors = tensors
        self.source = source
        self.record = record or TrainingRecord()
        self._channels = channels

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def of(self, name: str, *, rank: int) -> tuple[int, ...]:
        """Return the shape of a tensor.

        Errors: CheckpointError when the tensor is absent, empty, or not of rank ``rank``.
        """
        if name not in self.tensors:
            raise CheckpointError(
                f"{self.source}: tensor {name} is missing; its shape determines the size of the model"
            )
        shape = tuple(self.tensors[name].shape)
        if len(shape) != rank or 0 in shape:
            raise CheckpointError(
                f"{self.source}: {name} has shape {shape}; expected {rank} dimensions, each at least 1"
            )
        return shape

    def count(self, pattern: str) -> int:
        """Return 1 + the largest number that the first group of ``pattern`` matches in any name; 0 without a match."""
        matches = [match for match in map(re.compile(pattern).match, self.tensors) if match]
        return max((int(match.group(1)) + 1 for match in matches), default=0)

    def grid(self, positions: int, *, where: str) -> int:
        """Return the side of a square grid.  Errors: CheckpointError when ``positions`` is not a square number."""
        side = exact_root(positions)
        if side is None:
            raise CheckpointError(f"{self.source}: {where} has {positions} positions; expected a square grid")
        return side

    def linear_patch(self, name: str) -> tuple[int, int]:
        """Return (p, c) of a linear patch embedding (D, c·p·p), whose shape gives only the product c·p·p.

        c is 3 unless the user gives the channels, because the released code trains on RGB.
        Errors: CheckpointError when the product does not fit c.
        """
        values = self.of(name, rank=2)[1]
        channels = self._channels or _RELEASED_CHANNELS
        side = exact_root(values / channels)
        if side is None:
            possible = [c for c in CHANNELS if exact_root(values / c) is not None]
            given = f"--channels {channels}" if self._channels else f"images of {channels} channels"
            raise CheckpointError(
                f"{self.source}: {name} takes {values} values per patch; expected {channels}·p·p for {given} and "
                "square patches of p × p pixels",
                hint=f"type --channels {' or '.join(map(str, possible))}, which fits the file"
                if possible
                else "use another file: no supported number of channels makes these patches square",
            )
        return side, channels

    def convolution_patch(self, name: str) -> tuple[int, int, int]:
        """Return (D, p, c) of a patch convolution (D, c, p, p).  Errors: CheckpointError on any other shape."""
        dim, channels, height, width = self.of(name, rank=4)
        if channels not in CHANNELS or height != width:
            raise CheckpointError(
                f"{self.source}: {name} has shape {(dim, channels, height, width)}; expected (D, c, p, p) with "
                f"c = {', '.join(map(str, CHANNELS[:-1]))} or {CHANNELS[-1]}"
            )
        return dim, height, channels


def exact_root(value: float) -> int | None:
    """Return the square root if it is a whole number of at least 1, else None."""
    if value < 1 or value != int(value):
        return None
    root = math.isqrt(int(value))
    return root if root * root == value else None


def infer_mask(shapes: Shapes, hints: LoadHints, prefix: str) -> tuple[MaskSpec, int | None]:
    """Return (mask spec of an attention, number of heads); the number is None if the mask does not determine it.

    prefix: the prefix of the names of the mask's tensors.
    Errors: CheckpointError when a tensor of the mask is missing or a hint contradicts the file.
    """
    source = shapes.source
    parts = {part for part in ("alpha", "sigma", "mask") if f"{prefix}.{part}" in shapes}
    if not parts & {"alpha", "sigma"}:
        if hints.closed_form:
            raise CheckpointError(f"{source}: --mask-form closed was given, but the file holds no alpha and sigma")
        return MaskSpec(kind="elm" if parts else "plain"), None
    if missing := {"alpha", "sigma"} - parts:
        raise CheckpointError(f"{source}: {prefix}.{missing.pop()} is missing")
    if "mask" not in parts and not hints.closed_form:
        raise CheckpointError(
            f"{source}: {prefix}.mask, the stored base mask, is missing",
            hint="if the model was trained with the paper's closed formula, type --mask-form closed",
        )
    kernels, heads, *_ = shapes.of(f"{prefix}.alpha", rank=4)
    mask = MaskSpec(kind="gmm", kernels=kernels, shared=heads == 1, closed_form=bool(hints.closed_form))
    return mask, heads if heads > 1 else None


def mask_heads(shapes: Shapes, prefixes: Sequence[str]) -> list[int]:
    """Return the number of heads in the mask of each attention: 1 for a shared, single-head or missing mask."""
    alphas = [f"{prefix}.alpha" for prefix in prefixes]
    return [shapes.of(alpha, rank=4)[1] if alpha in shapes else 1 for alpha in alphas]


def infer_heads(
    source: str, *, width: int, known: int | None, evidence: str, hints: LoadHints, preset_heads: int | None
) -> int:
    """Return the number of heads from the file, else from ``hints``, else from the preset.

    width: H·d, the width of q.  known: the number of heads that follows from the file, or None.
    evidence: where ``known`` comes from, for messages that continue with the number.
    Errors: CheckpointError when the number is unknown, contradictory, or does not divide ``width``.
    """
    hinted = hints.heads
    if hinted is not None and preset_heads is not None and hinted != preset_heads:
        raise CheckpointError(f"{source}: --heads {hinted}, but the preset has {preset_heads}")
    if known is not None and hinted is not None and hinted != known:
        raise CheckpointError(f"{source}: --heads {hinted}, but {evidence} {known}")
    heads = known or hinted or preset_heads
    if heads is None:
        raise CheckpointError(
            f"{source}: this file does not determine the number of attention heads",
            hint="type --heads N or --preset NAME with the number of heads that the model was trained with; a wrong "
            "number raises no error, but the predictions are wrong. "
            f"N must divide {width}, the width of q, k and v: {_divisors(width)}",
        )
    if width % heads:
        raise CheckpointError(
            f"{source}: the width of q, k and v ({width}) is not a multiple of {heads} heads",
            hint=f"type --heads with the number of heads that the model was trained with: one of {_divisors(width)}",
        )
    return heads


def _divisors(width: int) -> list[int]:
    """Return the divisors of ``width`` up to 64, the possible numbers of heads."""
    return [n for n in range(1, 65) if width % n == 0]


def check_image_hints(source: str, hints: LoadHints, *, image_size: int, channels: int, evidence: str) -> None:
    """Check the user's image size and channels.  Errors: CheckpointError when they contradict the file.

    evidence: the source of the file's values, for the message, such as "its tensors show".
    """
    for option, given, own in (
        ("--image-size", hints.image_size, image_size),
        ("--channels", hints.channels, channels),
    ):
        if given is not None and given != own:
            raise CheckpointError(
                f"{source}: {option} {given} contradicts the file: {evidence} {own}",
                hint=f"omit {option}, or type {option} {own}",
            )


def asked_image(source: str, hints: LoadHints, *, example: str = "--image-size 28 --channels 1") -> tuple[int, int]:
    """Return (image size, channels) from the user, for files whose tensors do not determine them.

    Errors: CheckpointError that names the missing options and what to type.
    """
    options = {"--image-size": hints.image_size, "--channels": hints.channels}
    missing = [option for option, value in options.items() if value is None]
    if hints.image_size is None or hints.channels is None:
        raise CheckpointError(
            f"{source}: no tensor of this file shows {_ASKED_FOR[tuple(missing)]}",
            hint=f"type {' and '.join(missing)} with the values of the training, such as {example}",
        )
    return hints.image_size, hints.channels


_ASKED_FOR = {
    ("--image-size",): "the size of the images",
    ("--channels",): "the channels of the images",
    ("--image-size", "--channels"): "the size and the channels of the images",
}


def preset_of(
    hints: LoadHints,
    presets: Mapping[str, Callable[[int, int, MaskSpec], SpecT]],
    *,
    classes: int,
    image_size: int,
    mask: MaskSpec,
) -> SpecT | None:
    """Return the spec of the preset in ``hints`` with the file's classes, image size and mask; None without a preset.

    presets: the presets of the file's family; `checkpoints.loading` has checked that they include the preset.
    """
    return None if hints.preset is None else presets[hints.preset](classes, image_size, mask)


def compared_with_preset(spec: ModelSpec, preset: ModelSpec, *, name: str, source: str) -> None:
    """Compare a file's spec with the preset.  Errors: CheckpointError that lists every field in which they differ."""
    fields = [
        f
        for f in type(spec).__dataclass_fields__
        if f not in ("image_size", "channels", "classes", "mask", "class_token")
    ]
    if spec.image_size not in _CONFIGURED_SIZES:
        fields = [f for f in fields if f != "patch_size"]
    differing = [
        f"{field} {getattr(spec, field)} (the preset has {getattr(preset, field)})"
        for field in fields
        if getattr(spec, field) != getattr(preset, field)
    ]
    if differing:
        raise CheckpointError(f"{source}: the file does not match the preset {name}: {', '.join(differing)}")
