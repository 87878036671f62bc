"""Image bytes → what the network takes, exactly as training made it.

    decode (JPEG, PNG, WebP, BMP; first frame) → RGB → resize to S×S (bilinear, antialiased)
    pixels: uint8 (S, S, 3)            tensor: (pixels / 255 − mean) / std, float32, (3, S, S)

This is the one implementation: export, parity and client import it, and ``gmmvit repository``
copies this very file beside the server's preprocessing model. So it stands alone: standard library, numpy
and Pillow. The operations and their order are those of torchvision's ImageFolder loader, Resize on
a Pillow image, ToTensor and Normalize.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "MAX_IMAGE_BYTES",
    "MAX_IMAGE_PIXELS",
    "UnusableImage",
    "pixels_from_bytes",
    "pixels_from_image",
    "tensor_from_pixels",
]

FORMATS = ("JPEG", "PNG", "WEBP", "BMP")
MAX_IMAGE_PIXELS = 50_000_000
"""Width × height beyond which an image is not decoded: a small file can unpack to gigabytes."""
MAX_IMAGE_BYTES = 32 * 2**20
_WIDE_MODES = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")


class UnusableImage(ValueError):  # noqa: N818 - reads as what it says
    """The bytes are no image we take; the message says why."""


def pixels_from_bytes(data: bytes, image_size: int) -> NDArray[Any]:
    """Decode one encoded image.

    image_size: S, the side the network takes, in pixels.  Returns uint8 (S, S, 3).
    Transparency is dropped and EXIF rotation is not applied, as in training.
    Errors: UnusableImage on bytes that are empty, no image, truncated, too large, or deeper than
    8 bits a channel.
    """
    from PIL import Image

    if not data:
        raise UnusableImage("it is empty")
    if len(data) > MAX_IMAGE_BYTES:
        raise UnusableImage(f"it has {len(data)} bytes; at most {MAX_IMAGE_BYTES} are taken")
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    # Pillow's own guard against bombs fires while it reads the header, before ours can.
    except Image.DecompressionBombError as exc:
        raise UnusableImage(f"it is too large: {exc}") from exc
    except Exception as exc:
        raise UnusableImage(f"it is no {', '.join(FORMATS[:-1])} or {FORMATS[-1]} image") from exc
    with image:
        width, height = image.size
        if width * height > MAX_IMAGE_PIXELS:
            raise UnusableImage(f"it is {width}×{height}; at most {MAX_IMAGE_PIXELS} pixels are taken")
        if image.mode in _WIDE_MODES:
            raise UnusableImage(f"it has more than 8 bits a channel (mode {image.mode}); convert it to 8 bits")
        try:
            return pixels_from_image(image, image_size)
        # A damaged file can fail inside a decoder with any exception there is.
        except Exception as exc:
            raise UnusableImage(f"it is a damaged or truncated {image.format}: {exc}") from exc


def pixels_from_image(image: Any, image_size: int) -> NDArray[Any]:
    """An opened ``PIL.Image`` → uint8 (S, S, 3): RGB, then resized, bilinear with antialiasing."""
    from PIL import Image

    rgb = image.convert("RGB")
    if rgb.size != (image_size, image_size):
        rgb = rgb.resize((image_size, image_size), Image.Resampling.BILINEAR)
    return np.asarray(rgb, dtype=np.uint8)


def tensor_from_pixels(pixels: NDArray[Any], mean: Sequence[float], std: Sequence[float]) -> NDArray[Any]:
    """(pixels / 255 − mean) / std in float32, channels first.

    pixels: uint8 (..., S, S, 3).  Returns float32 (..., 3, S, S), contiguous.
    """
    scaled = pixels.astype(np.float32) / np.float32(255)
    normalised = (scaled - np.asarray(mean, np.float32)) / np.asarray(std, np.float32)
    return np.ascontiguousarray(np.moveaxis(normalised, -1, -3))
