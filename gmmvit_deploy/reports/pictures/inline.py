"""Put pictures into a page as PNG data."""

from __future__ import annotations

import base64
import io
from html import escape

from PIL import Image

__all__ = ["inline_image", "png"]

_COLOURS = 64


def png(image: Image.Image) -> bytes:
    """Return an image as a PNG file."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def inline_image(image: Image.Image, *, alt: str, all_colours: bool = False) -> str:
    """Return an image as HTML that needs no other file.

    alt: the description for a screen reader, as plain text.
    all_colours: False reduces the image to 64 colours. With 64 colours a page with hundreds of pictures is small, and
    the difference is not visible in a picture of white, blue and red.
    """
    data = base64.b64encode(png(image if all_colours else image.quantize(_COLOURS))).decode()
    return f'<img alt="{escape(alt)}" src="data:image/png;base64,{data}">'
