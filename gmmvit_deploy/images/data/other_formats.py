"""Turn the image files that a server refuses into PNG, so that local commands and servers see the same pixels.

A server decodes only the formats of `preprocess.FORMATS`, because strangers send it files. The files of a user can have
more formats, as in torchvision's ImageFolder.
"""

from __future__ import annotations

import io
from typing import Any

from gmmvit_deploy.images.preprocess import MAX_IMAGE_PIXELS, UnusableImage

__all__ = ["as_served"]

_SERVED = (b"\xff\xd8\xff", b"\x89PNG", b"RIFF", b"BM")  # JPEG, PNG, WebP, BMP
_OTHERS = ("GIF", "TIFF", "PPM", "JPEG2000", "AVIF")
_MODES_OF_PNG = ("1", "L", "LA", "P", "RGB", "RGBA")
_BITS_PER_SAMPLE = 258  # a tag of TIFF


def as_served(data: bytes) -> bytes:
    """Return the first frame of a GIF, TIFF, PPM, JPEG 2000 or AVIF file as a PNG, and any other bytes unchanged.

    Errors: UnusableImage when such a file is damaged or too large, or has more than 8 bits a channel.
    """
    from PIL import Image

    if data.startswith(_SERVED):
        return data
    try:
        image: Any = Image.open(io.BytesIO(data), formats=_OTHERS)
    except Image.DecompressionBombError as exc:
        raise UnusableImage(f"the image is too large: {exc}") from exc
    except Exception:  # whoever decodes the bytes says what they are not
        return data
    with image:
        if image.width * image.height > MAX_IMAGE_PIXELS:
            raise UnusableImage(
                f"the image is {image.width}×{image.height} pixels; the maximum is {MAX_IMAGE_PIXELS} pixels in total"
            )
        bits = max(image.tag_v2.get(_BITS_PER_SAMPLE, (1,))) if image.format == "TIFF" else 1
        if bits > 8 or image.mode.startswith(("I", "F")):
            raise UnusableImage(
                f"the image has more than 8 bits per channel (mode {image.mode}); convert the image to 8 bits"
            )
        png = io.BytesIO()
        try:
            plain = image if image.mode in _MODES_OF_PNG else image.convert("RGB")
            plain.save(png, "PNG", compress_level=1)
        # A damaged file can raise any exception inside a decoder.
        except Exception as exc:
            raise UnusableImage(f"the {image.format} image is damaged or truncated: {exc}") from exc
    return png.getvalue()
