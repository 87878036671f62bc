"""Convert image bytes to the network's input, exactly as in training.

    decode (JPEG, PNG, WebP, BMP; first frame) → L, LA, RGB or RGBA → resize to height × width
    pixels: uint8 (height, width, channels)
    tensor: (pixels / 255 − mean) / std, float32, (channels, height, width)

This is the only implementation: export, parity and client import it, and ``gmmvit repository`` copies this file
beside the server's preprocessing model. This file therefore imports only the standard library, numpy and Pillow. The
operations and their order are those of torchvision's ImageFolder loader, Resize on a Pillow image, ToTensor and
Normalize.

A file in another mode than the network's is converted with Pillow's ``Image.convert``:

    colour → grey     L = 0.299 R + 0.587 G + 0.114 B, in integers, rounded
    grey → colour     R = G = B = L
    alpha             dropped if the network has no alpha channel; 255 if the file has no alpha.  Resizing weights
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
"""Resize rule → name in ``PIL.Image.Resampling``.  ``stretch`` resizes both sides to the network's and ignores the
aspect ratio; Pillow's filters are antialiased."""
_WIDE_MODES = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")


class UnusableImage(ValueError):  # noqa: N818 - the image is unusable; the name reads better without Error
    """The bytes are not an image that can be used; the message gives the reason."""


def pixels_from_bytes(data: bytes, *, height: int, width: int, channels: int, resize: str) -> NDArray[Any]:
    """Decode an encoded image.

    height, width: the size of the network's input in pixels.  channels: the number of channels of that input, a key of
    `MODES`.  resize: the resize rule of training, a key of `RESAMPLING`.
    Returns uint8 (height, width, channels).  EXIF rotation is not applied, as in training.
    Errors: UnusableImage when ``data`` is empty, not an image, truncated or too large, or has more than 8 bits per
    channel.
    """
    from PIL import Image

    if not data:
        raise UnusableImage("the file is empty")
    if len(data) > MAX_IMAGE_BYTES:
        raise UnusableImage(f"the file has {len(data)} bytes; the maximum is {MAX_IMAGE_BYTES} bytes")
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    # Pillow's own check for decompression bombs raises while it reads the header, before the check below.
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
            return pixels_from_image(image, height=height, width=width, channels=channels, resize=resize)
        # A damaged file can raise any exception inside a decoder.
        except Exception as exc:
            raise UnusableImage(f"the {image.format} image is damaged or truncated: {exc}") from exc


def pixels_from_image(image: Any, *, height: int, width: int, channels: int, resize: str) -> NDArray[Any]:
    """Convert and resize an opened ``PIL.Image``; return uint8 (height, width, channels).

    channels, resize: as for `pixels_from_bytes`.
    """
    from PIL import Image

    mode, resampling = MODES[channels], Image.Resampling[RESAMPLING[resize]]
    converted = image.convert(mode)
    if converted.size != (width, height):
        converted = converted.resize((width, height), resampling)
    return np.asarray(converted, dtype=np.uint8).reshape(height, width, channels)


def tensor_from_pixels(pixels: NDArray[Any], mean: Sequence[float], std: Sequence[float]) -> NDArray[Any]:
    """Normalise: (pixels / 255 − mean) / std in float32, channels first.

    pixels: uint8 (..., height, width, channels).  Returns float32 (..., channels, height, width), contiguous.
    """
    scaled = pixels.astype(np.float32) / np.float32(255)
    normalised = (scaled - np.asarray(mean, np.float32)) / np.asarray(std, np.float32)
    return np.ascontiguousarray(np.moveaxis(normalised, -1, -3))
