"""Convert image bytes to the network's input, exactly as in training.

    bytes → decoded image → mode L, LA, RGB or RGBA → resized, cropped or padded to height × width

    pixels: uint8 (height, width, channels)
    tensor: (pixels / 255 − mean) / std, float32, (channels, height, width)

The file formats are JPEG, PNG, WebP and BMP; of several frames, the first frame is decoded. The operations and their
order are those of torchvision: the ImageFolder loader, Resize on a Pillow image, ToTensor and Normalize. The rules
center, squash and border are the three crop modes of timm's transform for evaluation, with timm's rounding:

    scale    ⌊height / crop_pct⌋ × ⌊width / crop_pct⌋
    stretch  resize to height × width
    squash   resize to scale; crop the centre to height × width
    center   resize so that the image just covers scale and keeps its aspect ratio; crop the centre to height × width
    border   resize so that the image just fits into scale and keeps its aspect ratio; crop the centre to height ×
             width where the image is larger, and pad with round(255 · mean) where the image is smaller

If the mode of a file differs from the mode of the network's input, Pillow's ``Image.convert`` converts the image:

    colour → grey       L = 0.299 R + 0.587 G + 0.114 B, in integers, rounded
    grey → colour       R = G = B = L
    alpha → no alpha    the alpha channel is dropped
    no alpha → alpha    the alpha of every pixel is 255

For an image with alpha, Pillow's resizing weights the colours by alpha. The colour of a fully transparent pixel
becomes 0.

This file is the only implementation of the preprocessing: export, parity and the client import it, and ``gmmvit
repository`` copies it into the folder of the server's preprocessing model. This file therefore imports only the
standard library, numpy and Pillow.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "MAX_IMAGE_BYTES",
    "MAX_IMAGE_PIXELS",
    "MODES",
    "RESAMPLING",
    "UnusableImage",
    "fitted",
    "pixels_from_bytes",
    "pixels_from_image",
    "scale_of",
    "tensor_from_pixels",
]

FORMATS = ("JPEG", "PNG", "WEBP", "BMP")
MAX_IMAGE_PIXELS = 50_000_000
"""The maximum width × height of an image, before and after resizing.

Larger images are refused, because a small file can decode to gigabytes.  The rule ``center`` can also enlarge an image
that is much longer than wide to gigabytes before the crop."""
MAX_IMAGE_BYTES = 32 * 2**20
"""The maximum size of an encoded image."""
MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}
"""Number of the network's input channels → the Pillow mode to which an image is converted."""
_FITS = ("stretch", "center", "squash", "border")
_FILTERS = {"bilinear": "BILINEAR", "bicubic": "BICUBIC"}
RESAMPLING = {f"{fit}-{name}": (fit, resampling) for fit in _FITS for name, resampling in _FILTERS.items()}
"""Name of a resize rule → (the way in which the image is fitted to height × width, name in ``PIL.Image.Resampling``).

The top of this file defines the ways of fitting. Pillow's filters are antialiased."""
_WIDE_MODES = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")


class UnusableImage(ValueError):  # noqa: N818 - the image is unusable; the name reads better without Error
    """The bytes are not an image that can be used.  The message gives the reason."""


def pixels_from_bytes(
    data: bytes,
    *,
    height: int,
    width: int,
    channels: int,
    resize: str,
    crop_pct: float = 1.0,
    mean: Sequence[float] | None = None,
) -> NDArray[Any]:
    """Decode an encoded image.

    data: the bytes of an image file.
    height, width: the size of the network's input, in pixels.  channels: the number of channels, a key of `MODES`.
    resize: the resize rule, a key of `RESAMPLING`.
    crop_pct: the size of the crop divided by the size after resizing; ``stretch`` ignores this value.
    mean: the mean of each channel, for pixel values scaled to [0, 1]. Only ``border`` uses the mean, and requires it.
    Returns uint8 (height, width, channels).  EXIF rotation is not applied, as in training.
    Errors: UnusableImage when the bytes are empty, are not an image, or are truncated.
    UnusableImage when the image is too large, or has more than 8 bits a channel.
    UnusableImage when the resize rule would make the image too large, or less than 1 pixel wide or high.
    """
    from PIL import Image

    if not data:
        raise UnusableImage("the file is empty")
    if len(data) > MAX_IMAGE_BYTES:
        raise UnusableImage(f"the file has {len(data)} bytes; the maximum is {MAX_IMAGE_BYTES} bytes")
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    # Pillow checks for decompression bombs when it reads the header, before the check below.
    except Image.DecompressionBombError as exc:
        raise UnusableImage(f"the image is too large: {exc}") from exc
    except Exception as exc:
        raise UnusableImage(f"the file is not a {', '.join(FORMATS[:-1])} or {FORMATS[-1]} image") from exc
    with image:
        columns, rows = image.size
        if columns * rows > MAX_IMAGE_PIXELS:
            raise UnusableImage(
                f"the image is {columns}×{rows} pixels; the maximum is {MAX_IMAGE_PIXELS} pixels in total"
            )
        if image.mode in _WIDE_MODES:
            raise UnusableImage(
                f"the image has more than 8 bits per channel (mode {image.mode}); convert the image to 8 bits"
            )
        try:
            return pixels_from_image(
                image, height=height, width=width, channels=channels, resize=resize, crop_pct=crop_pct, mean=mean
            )
        except UnusableImage:
            raise
        # A damaged file can raise any exception inside a decoder.
        except Exception as exc:
            raise UnusableImage(f"the {image.format} image is damaged or truncated: {exc}") from exc


def pixels_from_image(
    image: Any,
    *,
    height: int,
    width: int,
    channels: int,
    resize: str,
    crop_pct: float = 1.0,
    mean: Sequence[float] | None = None,
) -> NDArray[Any]:
    """Convert, resize and crop an opened ``PIL.Image``.

    height, width, channels, resize, crop_pct, mean: as for `pixels_from_bytes`.
    Returns uint8 (height, width, channels).
    Errors: UnusableImage when the resize rule would make the image too large, or less than 1 pixel wide or high.
    """
    from PIL import Image

    fit, resampling = RESAMPLING[resize]
    converted = fitted(
        image.convert(MODES[channels]),
        height=height,
        width=width,
        fit=fit,
        resampling=Image.Resampling[resampling],
        crop_pct=crop_pct,
        mean=mean,
    )
    return np.asarray(converted, dtype=np.uint8).reshape(height, width, channels)


def fitted(
    image: Any,
    *,
    height: int,
    width: int,
    fit: str,
    resampling: Any,
    crop_pct: float,
    mean: Sequence[float] | None = None,
) -> Any:
    """Resize, crop and pad a ``PIL.Image`` to ``width`` × ``height``; return the new ``PIL.Image``.

    fit: stretch, center, squash or border, as at the top of this file.  resampling: a ``PIL.Image.Resampling``.
    crop_pct, mean: as for `pixels_from_bytes`.
    Errors: as for `pixels_from_image`.  ValueError when ``fit`` is ``border`` and ``mean`` is None.
    """
    size = _resized_size(image.size, height=height, width=width, fit=fit, crop_pct=crop_pct)
    _require_possible(image.size, size, fit=fit)
    resized = image if size == image.size else image.resize(size, resampling)
    if size == (width, height):
        return resized
    left, top = _begin(size[0], width), _begin(size[1], height)
    if size[0] >= width and size[1] >= height:
        return resized.crop((left, top, left + width, top + height))
    return _padded(resized, left, top, height=height, width=width, mean=mean)


def scale_of(side: int, crop_pct: float) -> int:
    """Return ⌊side / crop_pct⌋, the number of pixels from which the crop takes ``side`` pixels."""
    return math.floor(side / crop_pct)


def _resized_size(size: tuple[int, int], *, height: int, width: int, fit: str, crop_pct: float) -> tuple[int, int]:
    """Return (width, height) after resizing and before cropping, for an image of ``size`` (width, height)."""
    if fit == "stretch":
        return width, height
    columns, rows = size
    scaled_width, scaled_height = scale_of(width, crop_pct), scale_of(height, crop_pct)
    if fit == "squash":
        return scaled_width, scaled_height
    if fit == "center" and scaled_width == scaled_height:
        # torchvision's Resize, which timm uses for squares, rounds the longer side down.
        shorter = min(columns, rows)
        return int(scaled_width * columns / shorter), int(scaled_width * rows / shorter)
    # timm's ResizeKeepRatio rounds to the nearest whole number, and halves to even. The two divisions must stay
    # separate, because a single division can round to another number.
    ratios = columns / scaled_width, rows / scaled_height
    ratio = min(ratios) if fit == "center" else max(ratios)
    return round(columns / ratio), round(rows / ratio)


def _require_possible(size: tuple[int, int], resized: tuple[int, int], *, fit: str) -> None:
    (columns, rows), (new_columns, new_rows) = size, resized
    what = f"the image is {columns}×{rows} pixels, and {new_columns}×{new_rows} pixels after resizing by the rule {fit}"
    if min(resized) < 1:
        raise UnusableImage(f"{what}; expected at least 1 pixel in width and height")
    if new_columns * new_rows > MAX_IMAGE_PIXELS:
        raise UnusableImage(f"{what}; the maximum is {MAX_IMAGE_PIXELS} pixels in total")


def _begin(length: int, side: int) -> int:
    """Return the first pixel of the crop in an image of ``length`` pixels; at most 0 if the image is padded."""
    # torchvision's CenterCrop rounds halves to even. Its padding is smaller on the left, or at the top.
    return round((length - side) / 2) if length >= side else -((side - length) // 2)


def _padded(image: Any, left: int, top: int, *, height: int, width: int, mean: Sequence[float] | None) -> Any:
    from PIL import Image

    if mean is None:
        raise ValueError("the resize rule border needs the mean of each channel, for the colour of the padding")
    colour = tuple(round(255 * value) for value in mean)
    canvas = Image.new(image.mode, (width, height), colour if len(colour) > 1 else colour[0])
    canvas.paste(image, (-left, -top))
    return canvas


def tensor_from_pixels(pixels: NDArray[Any], mean: Sequence[float], std: Sequence[float]) -> NDArray[Any]:
    """Normalise pixels: return (pixels / 255 − mean) / std in float32, with the channels first.

    pixels: uint8 (..., height, width, channels).  mean, std: a number for each channel.
    Returns float32 (..., channels, height, width), contiguous.
    """
    scaled = pixels.astype(np.float32) / np.float32(255)
    normalised = (scaled - np.asarray(mean, np.float32)) / np.asarray(std, np.float32)
    return np.ascontiguousarray(np.moveaxis(normalised, -1, -3))
