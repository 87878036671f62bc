"""The usual mistakes of preprocessing: channels in another order, another mean and std, another filter or crop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.bundle.golden import GoldenSet
from gmmvit_deploy.images.datasets import DATASETS
from gmmvit_deploy.images.spec import ImageSpec
from gmmvit_deploy.inference.preprocess import RESAMPLING, UnusableImage, fitted


@dataclass(frozen=True, slots=True)
class _Fit:
    """A way to fit an image to the network's size, as in `preprocess.fitted`; black: the padding is black."""

    name: str
    crop_pct: float
    black: bool = False

    def __str__(self) -> str:
        if self.name == "stretch":
            return self.name
        return f"{self.name} with crop_pct {self.crop_pct:g}{', padded with black' if self.black else ''}"


CROP_PCTS = (1.0, 0.875, 0.9, 0.95)
"""The values of crop_pct that most of timm's models use."""
_FITS = (
    _Fit("stretch", 1.0),
    *(_Fit(name, crop_pct) for name in ("center", "squash", "border") for crop_pct in CROP_PCTS),
    *(_Fit("border", crop_pct, black=True) for crop_pct in CROP_PCTS),
)
"""The ways to try when pixels differ, in addition to each way with the crop_pct of the bundle."""


def bgr(channels: int) -> list[int] | None:
    """Return the channel order with red and blue exchanged; None for fewer than 3 channels."""
    return [2, 1, 0, *range(3, channels)] if channels >= 3 else None


def normalisations(spec: ImageSpec) -> Iterator[tuple[str, ImageSpec]]:
    """Yield (description, spec with another mean and std) for normalisations that are often used by mistake."""
    known = {
        f"the mean and std of {name}": (data.mean, data.std)
        for name, data in DATASETS.items()
        if len(data.mean) == spec.channels
    }
    if spec.channels == 3:
        known["the mean and std of ImageNet"] = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
        known["the mean and std of CLIP"] = (
            (0.48145466, 0.4578275, 0.40821073),
            (0.26862954, 0.26130258, 0.27577711),
        )
    if spec.channels == 1:
        known["the mean and std of MNIST's training images"] = (0.1307,), (0.3081,)
    known[f"mean and std {', '.join(['0.5'] * spec.channels)}"] = (0.5,) * spec.channels, (0.5,) * spec.channels
    known["mean 0 and std 1 (values in [0, 1])"] = (0.0,) * spec.channels, (1.0,) * spec.channels
    for name, (mean, std) in known.items():
        if (mean, std) != spec.normalisation:
            yield f"normalised with {name}", replace(spec, mean=mean, std=std)


def normalised_otherwise(pixels: NDArray[Any], spec: ImageSpec) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield (description, tensor) for pixels (B, height, width, channels) in BGR, and normalised by mistake."""
    if (colours := bgr(spec.channels)) is not None:
        yield "channels in the order BGR", spec.tensor_from_pixels(pixels[..., colours])
    for name, other in normalisations(spec):
        yield name, other.tensor_from_pixels(pixels)


def pixel_mistakes(golden: GoldenSet, spec: ImageSpec) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield (description of the mistake, pixels of the golden images with the mistake) for each usual mistake.

    Mistakes in the filter alone come first, then mistakes in the fit alone, then mistakes in both.
    """
    import io

    from PIL import Image

    if (colours := bgr(spec.channels)) is not None:
        yield "channels in the order BGR", golden.image_pixels[..., colours]
    fit, name = RESAMPLING[spec.resize]
    own_filter, own_fit = Image.Resampling[name], _Fit(fit, 1.0 if fit == "stretch" else spec.crop_pct)
    decoded = [Image.open(io.BytesIO(image)).convert(spec.mode) for image in golden.images]
    other_filters = [resampling for resampling in Image.Resampling if resampling is not own_filter]
    same_crop = (replace(other, crop_pct=spec.crop_pct) for other in _FITS if other.name != "stretch")
    other_fits = [other for other in dict.fromkeys((*same_crop, *_FITS)) if other != own_fit]
    mistakes = [
        *((resampling, own_fit) for resampling in other_filters),
        *((own_filter, other) for other in other_fits),
        *((resampling, other) for other in other_fits for resampling in other_filters),
    ]
    for resampling, other in mistakes:
        made = _all_fitted(decoded, spec, other, resampling)
        if made is None:
            continue
        differences = []
        if resampling is not own_filter:
            differences.append(f"resized with {resampling.name.lower()} instead of {own_filter.name.lower()}")
        if other != own_fit:
            differences.append(f"fitted by {other} instead of {own_fit}")
        yield ", ".join(differences), made.reshape(golden.image_pixels.shape)


def _all_fitted(decoded: Sequence[Any], spec: ImageSpec, fit: _Fit, resampling: Any) -> NDArray[Any] | None:
    """Fit decoded images to the network's size; return None if the fit cannot resize an image."""
    target: dict[str, Any] = {"height": spec.height, "width": spec.width, "fit": fit.name, "crop_pct": fit.crop_pct}
    mean = (0.0,) * spec.channels if fit.black else spec.mean
    try:
        pixels = [fitted(image, **target, resampling=resampling, mean=mean) for image in decoded]
    except UnusableImage:
        return None
    stacked: NDArray[Any] = np.stack([np.asarray(image) for image in pixels])
    return stacked
