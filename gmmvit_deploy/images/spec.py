"""Describe the input images of a network, and convert images of any size to inputs.

    file → decode to the network's channels → resize, crop or pad → pixels, uint8 (height, width, channels)
    pixels → (pixels / 255 − mean) / std → tensor, float32 (channels, height, width)

`gmmvit_deploy.inference.preprocess` computes these two conversions, and documents the conversion of other colour modes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.images.resize_rules import (
    STATE_PREPROCESSING,
    ResizeRule,
    fit_of,
    one_of,
    require_crop_pct,
    resize_rule_from,
)
from gmmvit_deploy.inference.preprocess import (
    MAX_IMAGE_PIXELS,
    MODES,
    Target,
    pixels_from_bytes,
    pixels_from_image,
    scale_of,
    tensor_from_pixels,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpec:
    """Input images of a network.

    height, width: the size in pixels.  channels: 1 for grey, 2 for grey and alpha, 3 for RGB, 4 for RGB and alpha.
    mean, std: the normalisation, a value for each channel, for pixel values scaled to [0, 1]. Mean and std are None if
    the normalisation is unknown. Images cannot be converted to tensors without normalisation.
    resize: the rule for resizing images.
    crop_pct: the side of the crop divided by the side after resizing, above 0 and at most 1. The rules ``stretch``
    do not crop and take only 1.
    Errors: InputError when a value is invalid, such as a mean or a std above 1, when ``crop_pct`` is not 1 with a rule
    ``stretch``, or when a rule ``border`` has no mean, because the mean is the colour of the padding.
    """

    height: int
    width: int
    channels: int
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    resize: ResizeRule = "stretch-bilinear"
    crop_pct: float = 1.0

    def __post_init__(self) -> None:
        for name in ("height", "width"):
            side = getattr(self, name)
            if not isinstance(side, int) or side < 1:
                raise InputError(f"image {name}: expected a whole number of at least 1, got {side!r}")
        if self.channels not in MODES:
            raise InputError(f"image channels: expected {one_of(MODES)}, got {self.channels!r}")
        resize_rule_from(self.resize)
        if (self.mean is None) != (self.std is None):
            given, missing = ("mean", "std") if self.std is None else ("std", "mean")
            raise InputError(
                f"image normalisation: expected both mean and std, or neither; got {given} without {missing}"
            )
        for name in ("mean", "std"):
            self._check_numbers(name, getattr(self, name))
        self._check_scale()
        self._check_crop()

    def _check_numbers(self, name: str, values: tuple[float, ...] | None) -> None:
        if values is None:
            return
        if len(values) != self.channels:
            raise InputError(
                f"image {name}: expected {self.channels} numbers, one for each channel of the network, "
                f"got {len(values)}: {', '.join(map(str, values))}",
                hint=f"type --mean and --std with the values of training, {self.channels} numbers each",
            )
        if not all(math.isfinite(value) for value in values):
            raise InputError(f"image {name}: expected finite numbers, got {', '.join(map(str, values))}")
        if name == "std" and min(values) <= 0:
            raise InputError(f"image std: expected numbers above 0, got {', '.join(map(str, values))}")

    def _check_scale(self) -> None:
        """Refuse mean and std for pixel values from 0 to 255: with them, every image becomes nearly the same input."""
        if self.mean is None or self.std is None or max(*self.mean, *self.std) <= 1:
            return
        # A mean of at most 1, or a std below 1, is not for pixel values from 0 to 255.
        scaled = {"mean": self.mean, "std": self.std}
        if max(self.mean) > 1:
            scaled["mean"] = tuple(value / 255 for value in self.mean)
        if max(self.std) >= 1:
            scaled["std"] = tuple(value / 255 for value in self.std)
        options = [f"--{name} {','.join(f'{value:.6g}' for value in values)}" for name, values in scaled.items()]
        raise InputError(
            "image mean and std: expected values for pixel values scaled to [0, 1], so at most 1, got mean "
            f"{', '.join(map(str, self.mean))} and std {', '.join(map(str, self.std))}",
            hint=f"if they are for pixel values from 0 to 255, divide by 255: {' '.join(options)}",
        )

    def _check_crop(self) -> None:
        crop_pct = self.crop_pct
        require_crop_pct("image crop_pct", crop_pct, self.resize)
        # The first condition keeps infinity, the quotient for a tiny crop_pct, away from the floor.
        if max(self.height, self.width) / crop_pct > MAX_IMAGE_PIXELS or (
            scale_of(self.height, crop_pct) * scale_of(self.width, crop_pct) > MAX_IMAGE_PIXELS
        ):
            raise InputError(
                f"image crop_pct: with {crop_pct}, an image would be resized to more than {MAX_IMAGE_PIXELS} pixels "
                f"before the crop to {self.height}×{self.width}"
            )
        if self._fit == "shortest" and self.height != self.width:
            raise InputError(
                f"the resize rule {self.resize} is for square images, got {self.height}×{self.width}",
                hint="type --resize center-bilinear or --resize center-bicubic",
            )
        if self._fit == "border" and self.mean is None:
            raise InputError(
                f"the resize rule {self.resize} needs the mean of each channel for the colour of the padding",
                hint="add --dataset, or --mean and --std",
            )

    @property
    def _fit(self) -> str:
        return fit_of(self.resize)

    @property
    def resize_text(self) -> str:
        """Return the resize rule for a reader; for a rule that crops, such as ``center-bicubic, crop_pct 0.9``."""
        return self.resize if self._fit == "stretch" else f"{self.resize}, crop_pct {self.crop_pct:g}"

    @property
    def normalisation(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """Return (mean, std), or None if the normalisation is unknown."""
        return None if self.mean is None or self.std is None else (self.mean, self.std)

    @property
    def mode(self) -> str:
        """Pillow's mode for decoded images: L, LA, RGB or RGBA."""
        return MODES[self.channels]

    @property
    def pixels_shape(self) -> tuple[int, int, int]:
        """Shape of an image as uint8: (height, width, channels)."""
        return (self.height, self.width, self.channels)

    @property
    def tensor_shape(self) -> tuple[int, int, int]:
        """Shape of an image as float32: (channels, height, width)."""
        return (self.channels, self.height, self.width)

    def pixels_from_bytes(self, data: bytes) -> NDArray[Any]:
        """Return uint8 (height, width, channels) of an encoded image, resized and cropped.  Errors: UnusableImage."""
        return pixels_from_bytes(data, **self._target)

    def pixels_from_image(self, image: Any) -> NDArray[Any]:
        """Return uint8 (height, width, channels) of a ``PIL.Image``, resized and cropped.  Errors: UnusableImage."""
        return pixels_from_image(image, **self._target)

    def tensor_from_pixels(self, pixels: NDArray[Any]) -> NDArray[Any]:
        """Normalise uint8 (..., height, width, c) to float32 (..., c, height, width).  Errors: InputError."""
        if self.mean is None or self.std is None:
            raise InputError(
                "the normalisation of the images is unknown: expected mean and std", hint=STATE_PREPROCESSING
            )
        return tensor_from_pixels(pixels, self.mean, self.std)

    @property
    def _target(self) -> Target:
        return {
            "height": self.height,
            "width": self.width,
            "channels": self.channels,
            "resize": self.resize,
            "crop_pct": self.crop_pct,
            "mean": self.mean,
        }

    def to_json(self) -> dict[str, Any]:
        """Return the spec as plain JSON values; inverse of `image_from_json`."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


def image_from_json(data: Mapping[str, Any]) -> ImageSpec:
    """Rebuild a spec.  Errors: TypeError when a field is missing or unknown; InputError when a value is invalid."""
    if missing := {field.name for field in fields(ImageSpec)} - set(data):
        raise TypeError(f"image: expected {', '.join(sorted(missing))}, which are missing")
    read: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
    return ImageSpec(**read)


def image_from_pixels(pixels: NDArray[Any]) -> Any:
    """Convert uint8 pixels, (height, width) or (height, width, channels), to a ``PIL.Image``."""
    from PIL import Image

    # Pillow expects a grey image without the channel dimension.
    return Image.fromarray(pixels[..., 0] if pixels.ndim == 3 and pixels.shape[-1] == 1 else pixels)
