"""Convert image bytes to the network's input, exactly as in training.

    bytes → decoded image → mode L, LA, RGB or RGBA → resized to height × width

    pixels: uint8 (height, width, channels)
    tensor: (pixels / 255 − mean) / std, float32, (channels, height, width)

The file formats are JPEG, PNG, WebP and BMP; of several frames, the first frame is decoded. The operations and their
order are those of torchvision: the ImageFolder loader, Resize on a Pillow image, ToTensor and Normalize.

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
"""The maximum width × height of an image.  Larger images are refused, because a small file can decode to gigabytes."""
MAX_IMAGE_BYTES = 32 * 2**20
"""The maximum size of an encoded image."""
MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}
"""Number of the network's input channels → the Pillow mode to which an image is converted."""
RESAMPLING = {"stretch-bilinear": "BILINEAR", "stretch-bicubic": "BICUBIC"}
"""Name of a resize rule → name in ``PIL.Image.Resampling``.

``stretch`` resizes both sides to the network's height and width, whatever the aspect ratio of the image. Pillow's
filters are antialiased."""
_WIDE_MODES = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")


class UnusableImage(ValueError):  # noqa: N818 - the image is unusable; the name reads better without Error
    """The bytes are not an image that can be used.  The message gives the reason."""


def pixels_from_bytes(data: bytes, *, height: int, width: int, channels: int, resize: str) -> NDArray[Any]:
    """Decode an encoded image.

    data: the bytes of an image file.
    height, width: the size of the network's input, in pixels.  channels: the number of channels, a key of `MODES`.
    resize: the resize rule, a key of `RESAMPLING`.
    Returns uint8 (height, width, channels).  EXIF rotation is not applied, as in training.
    Errors: UnusableImage when the bytes are empty, are not an image, or are truncated.
    UnusableImage when the image is too large, or has more than 8 bits a channel.
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
            return pixels_from_image(image, height=height, width=width, channels=channels, resize=resize)
        # A damaged file can raise any exception inside a decoder.
        except Exception as exc:
            raise UnusableImage(f"the {image.format} image is damaged or truncated: {exc}") from exc


def pixels_from_image(image: Any, *, height: int, width: int, channels: int, resize: str) -> NDArray[Any]:
    """Convert and resize an opened ``PIL.Image``.

    height, width, channels, resize: as for `pixels_from_bytes`.  Returns uint8 (height, width, channels).
    """
    from PIL import Image

    mode, resampling = MODES[channels], Image.Resampling[RESAMPLING[resize]]
    converted = image.convert(mode)
    if converted.size != (width, height):
        converted = converted.resize((width, height), resampling)
    return np.asarray(converted, dtype=np.uint8).reshape(height, width, channels)


def tensor_from_pixels(pixels: NDArray[Any], mean: Sequence[float], std: Sequence[float]) -> NDArray[Any]:
    """Normalise pixels: return (pixels / 255 − mean) / std in float32, with the channels first.

    pixels: uint8 (..., height, width, channels).  mean, std: a number for each channel.
    Returns float32 (..., channels, height, width), contiguous.
    """
    scaled = pixels.astype(np.float32) / np.float32(255)
    normalised = (scaled - np.asarray(mean, np.float32)) / np.asarray(std, np.float32)
    return np.ascontiguousarray(np.moveaxis(normalised, -1, -3))
