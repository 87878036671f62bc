"""Decode the image files that a server refuses, because strangers send it files, and turn them into PNG files."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.inference.preprocess import MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS, UnusableImage

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gmmvit_deploy.images.spec import ImageSpec

_SERVED = (b"\xff\xd8\xff", b"\x89PNG", b"RIFF", b"BM")  # JPEG, PNG, WebP, BMP
_OTHERS = ("GIF", "TIFF", "PPM", "JPEG2000", "AVIF", "DIB", "ICO", "PCX", "SGI", "XBM", "DDS", "TGA")
_MODES_OF_PNG = ("1", "L", "LA", "P", "RGB", "RGBA")
_BITS_PER_SAMPLE = 258  # a tag of TIFF


def as_served(data: bytes) -> bytes:
    """Return the first frame of a file of `_OTHERS` as a PNG, and any other bytes unchanged.  Errors: UnusableImage."""
    image = _opened(data)
    if image is None:
        return data
    png = io.BytesIO()
    image.save(png, "PNG", compress_level=1)
    size = png.tell()
    if size > MAX_IMAGE_BYTES:
        raise UnusableImage(
            f"the file was converted to PNG for the server, and the PNG has {size} bytes; the maximum is "
            f"{MAX_IMAGE_BYTES} bytes; make the image smaller, or classify it on this computer with --bundle"
        )
    return png.getvalue()


def pixels_of_file(data: bytes, image: ImageSpec) -> NDArray[Any]:
    """Decode a file as uint8 (height, width, channels), as a server decodes `as_served`.  Errors: UnusableImage."""
    opened = _opened(data)
    return image.pixels_from_bytes(data) if opened is None else image.pixels_from_image(opened)


def _opened(data: bytes) -> Any:
    """Return the decoded first frame of a file of `_OTHERS`, in a mode of PNG; None for any other bytes."""
    from PIL import Image

    if data.startswith(_SERVED):
        return None
    try:
        image: Any = Image.open(io.BytesIO(data), formats=_OTHERS)
    except Image.DecompressionBombError as exc:
        raise UnusableImage(f"the image is too large: {exc}") from exc
    except Exception:  # whoever decodes the bytes says what they are not
        return None
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
        try:
            return image.copy() if image.mode in _MODES_OF_PNG else image.convert("RGB")
        # A damaged file can raise any exception inside a decoder.
        except Exception as exc:
            raise UnusableImage(f"the {image.format} image is damaged or truncated: {exc}") from exc
