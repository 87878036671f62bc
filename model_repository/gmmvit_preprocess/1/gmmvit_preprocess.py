"""Image bytes → what the network takes, exactly as training made it.

    decode (JPEG, PNG, WebP, BMP; first frame) → L, LA, RGB or RGBA → resize to height × width
    pixels: uint8 (height, width, channels)
    tensor: (pixels / 255 − mean) / std, float32, (channels, height, width)

This is the one implementation: export, parity and client import it, and ``gmmvit repository``
copies this very file beside the server's preprocessing model. So it stands alone: standard library, numpy
and Pillow. The operations and their order are those of torchvision's ImageFolder loader, Resize on
a Pillow image, ToTensor and Normalize.

A file of another mode than the network's becomes what Pillow's ``Image.convert`` makes of it:

    colour → grey     L = 0.299 R + 0.587 G + 0.114 B, in integers, rounded
    grey → colour     R = G = B = L
    alpha             dropped where the network takes none; 255 where the file has none.  Resizing weights
                      colours by their alpha, so the colour of a fully transparent pixel becomes 0
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
    "MODES",
    "RESAMPLING",
    "UnusableImage",
    "pixels_from_bytes",
    "pixels_from_image",
    "tensor_from_pixels",
]

FORMATS = ("JPEG", "PNG", "WEBP", "BMP")
MAX_IMAGE_PIXELS = 50_000_000
"""Width × height beyond which an image is not decoded: a small file can unpack to gigabytes."""
MAX_IMAGE_BYTES = 32 * 2**20
MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}
"""Channels of the network → Pillow mode that a file is decoded to."""
RESAMPLING = {"stretch-bilinear": "BILINEAR", "stretch-bicubic": "BICUBIC"}
"""Resize rule → name in ``PIL.Image.Resampling``.  ``stretch``: both sides to the network's, whatever the
proportions; Pillow's filters are antialiased."""
_WIDE_MODES = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")


class UnusableImage(ValueError):  # noqa: N818 - reads as what it says
    """The bytes are no image we take; the message says why."""


def pixels_from_bytes(data: bytes, *, height: int, width: int, channels: int, resize: str) -> NDArray[Any]:
    """Decode one encoded image.

    height, width: in pixels; channels: a key of `MODES`; resize: a key of `RESAMPLING`; all as the network takes
    them.  Returns uint8 (height, width, channels).  EXIF rotation is not applied, as in training.
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
        columns, rows = image.size
        if columns * rows > MAX_IMAGE_PIXELS:
            raise UnusableImage(f"it is {columns}×{rows}; at most {MAX_IMAGE_PIXELS} pixels are taken")
        if image.mode in _WIDE_MODES:
            raise UnusableImage(f"it has more than 8 bits a channel (mode {image.mode}); convert it to 8 bits")
        try:
            return pixels_from_image(image, height=height, width=width, channels=channels, resize=resize)
        # A damaged file can fail inside a decoder with any exception there is.
        except Exception as exc:
            raise UnusableImage(f"it is a damaged or truncated {image.format}: {exc}") from exc


def pixels_from_image(image: Any, *, height: int, width: int, channels: int, resize: str) -> NDArray[Any]:
    """An opened ``PIL.Image`` → uint8 (height, width, channels): converted, then resized.

    channels, resize: as for `pixels_from_bytes`.
    """
    from PIL import Image

    mode, resampling = MODES[channels], Image.Resampling[RESAMPLING[resize]]
    converted = image.convert(mode)
    if converted.size != (width, height):
        converted = converted.resize((width, height), resampling)
    return np.asarray(converted, dtype=np.uint8).reshape(height, width, channels)


def tensor_from_pixels(pixels: NDArray[Any], mean: Sequence[float], std: Sequence[float]) -> NDArray[Any]:
    """(pixels / 255 − mean) / std in float32, channels first.

    pixels: uint8 (..., height, width, channels).  Returns float32 (..., channels, height, width), contiguous.
    """
    scaled = pixels.astype(np.float32) / np.float32(255)
    normalised = (scaled - np.asarray(mean, np.float32)) / np.asarray(std, np.float32)
    return np.ascontiguousarray(np.moveaxis(normalised, -1, -3))
