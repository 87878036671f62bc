"""Convert image bytes to the network's input, exactly as in training.

    bytes → decoded image → mode L, LA, RGB or RGBA → resized, cropped or padded to height × width

    pixels: uint8 (height, width, channels)
    tensor: (pixels / 255 − mean) / std, float32, (channels, height, width)

The file formats are JPEG, PNG, WebP and BMP; of several frames, the first frame is decoded. The operations and their
order are those of torchvision: the ImageFolder loader, Resize on a Pillow image, ToTensor and Normalize. The rules
center, squash and border are the three crop modes of timm's transform for evaluation, with timm's rounding. The rule
shortest is that of the image processors of Hugging Face transformers with Pillow, with their rounding:

    scale     ⌊height / crop_pct⌋ × ⌊width / crop_pct⌋
    stretch   resize to height × width
    squash    resize to scale; crop the centre to height × width
    center    resize so that the image just covers scale and keeps its aspect ratio; crop the centre to height × width
    shortest  as center, for height = width only; the first row and the first column of the crop are rounded down
    border    resize so that the image just fits into scale and keeps its aspect ratio; crop the centre to height ×
              width where the image is larger, and pad with round(255 · mean) where the image is smaller

If the mode of a file differs from the mode of the network's input, Pillow's ``Image.convert`` converts the image:

    colour → grey       L = 0.299 R + 0.587 G + 0.114 B, in integers, rounded
    grey → colour       R = G = B = L
    alpha → no alpha    the alpha channel is dropped
    no alpha → alpha    the alpha of every pixel is 255

For an image with alpha, Pillow's resizing weights the colours by alpha. The colour of a fully transparent pixel
becomes 0.

This file is the only implementation of the preprocessing: export, parity, the client and the server use it.
"""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from typing import NotRequired, Unpack

_BASE64 = bytes.maketrans(b"-_", b"+/")
"""From base64's alphabet for URLs to the usual one."""
_DATA_URL = re.compile(rb"data:[^,]*;base64,", re.IGNORECASE)
FORMATS = ("JPEG", "PNG", "WEBP", "BMP")
SMALL_PIXELS = 2**20
"""The maximum number of pixels that the served preprocessing decodes at once, unless of a single image; about 10 ms."""
MAX_IMAGE_PIXELS = 50_000_000
"""The maximum width × height of an image, before and after resizing.

Larger images are refused, because a small file can decode to gigabytes.  The rule ``center`` can also enlarge an image
that is much longer than wide to gigabytes before the crop."""
MAX_IMAGE_BYTES = 32 * 2**20
"""The maximum size of an encoded image."""
MAX_SCANS = 100
"""The maximum number of scans of a JPEG image. Each scan decodes all pixels again; encoders write about ten scans."""
MAX_SEGMENTS = 1000
"""The maximum number of segments of a JPEG image, and of chunks of a PNG image without the chunks of pixels.

Pillow reads these parts in Python: a file of 32 MiB could hold millions, and would take tens of seconds to open."""
MAX_DATA_CHUNKS = 10_000
"""The maximum number of chunks of a PNG image that hold pixels."""
MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}
"""Number of the network's input channels → the Pillow mode to which an image is converted."""
_FITS = ("stretch", "center", "squash", "border", "shortest")
_FILTERS = {"bilinear": "BILINEAR", "bicubic": "BICUBIC"}
RESAMPLING = {f"{fit}-{name}": (fit, resampling) for fit in _FITS for name, resampling in _FILTERS.items()}
"""Name of a resize rule → (the way in which the image is fitted to height × width, name in ``PIL.Image.Resampling``).

The top of this file defines the ways of fitting. Pillow's filters are antialiased."""
_WIDE_MODES = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
"""A marker of a JPEG image: 0xFF in the compressed pixels is followed by 0, or by a restart marker (0xD0 to 0xD7)."""
_END_OF_IMAGE, _START_OF_SCAN, _WITHOUT_LENGTH = 0xD9, 0xDA, (0x01, 0xD8)


class UnusableImage(ValueError):  # noqa: N818 - the image is unusable; the name reads better without Error
    """The bytes are not an image that can be used.  The message gives the reason."""


class Target(TypedDict):
    """The input of a network, and how an image becomes an input.

    height, width: the size of the network's input, in pixels.  channels: the number of channels, a key of `MODES`.
    resize: the resize rule, a key of `RESAMPLING`.
    crop_pct: the size of the crop divided by the size after resizing, 1 by default; ``stretch`` ignores this value.
    mean: the mean of each channel, for pixel values scaled to [0, 1]. Only ``border`` uses the mean, and requires it.
    """

    height: int
    width: int
    channels: int
    resize: str
    crop_pct: NotRequired[float]
    mean: NotRequired[Sequence[float] | None]


def pixels_from_bytes(data: bytes, **target: Unpack[Target]) -> NDArray[Any]:
    """Decode an encoded image.  Returns uint8 (height, width, channels).

    EXIF rotation is not applied, as in training.  Errors: UnusableImage, as `open_image` and `pixels_from_opened`.
    """
    with open_image(data) as image:
        return pixels_from_opened(image, **target)


def bytes_from_base64(text: bytes) -> bytes | None:
    """Decode base64 text, also of a ``data:`` URL, with line breaks, in the alphabet for URLs, or without padding.

    Returns None for any other text.
    """
    head = _DATA_URL.match(text)
    body = text[head.end() :] if head else text
    body = body.translate(_BASE64, delete=b" \t\r\n")
    try:
        return base64.b64decode(body + b"=" * (-len(body) % 4), validate=True) or None
    except ValueError:
        return None


def open_image(data: bytes) -> Any:
    """Open an encoded image as a ``PIL.Image``, and check its header, without decoding a pixel.

    Errors: UnusableImage when the bytes are empty, or are not an image; when the image is too large, has more than 8
    bits a channel, or has more parts than `MAX_SCANS`, `MAX_SEGMENTS` and `MAX_DATA_CHUNKS` allow.
    """
    from PIL import Image

    if not data:
        raise UnusableImage("the file is empty")
    if len(data) > MAX_IMAGE_BYTES:
        raise UnusableImage(f"the file has {len(data)} bytes; the maximum is {MAX_IMAGE_BYTES} bytes")
    _require_few_parts(data)
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    # Pillow checks for decompression bombs when it reads the header, before the check below.
    except Image.DecompressionBombError as exc:
        raise UnusableImage(f"the image is too large: {exc}") from exc
    except Exception as exc:
        raise UnusableImage(f"the file is not a {', '.join(FORMATS[:-1])} or {FORMATS[-1]} image") from exc
    try:
        columns, rows = image.size
        if columns * rows > MAX_IMAGE_PIXELS:
            raise UnusableImage(
                f"the image is {columns}×{rows} pixels; the maximum is {MAX_IMAGE_PIXELS} pixels in total"
            )
        if image.mode in _WIDE_MODES or _has_16_bits(image):
            raise UnusableImage(
                f"the image has more than 8 bits per channel (mode {image.mode}); convert the image to 8 bits"
            )
    except UnusableImage:
        image.close()
        raise
    return image


def pixels_from_opened(image: Any, **target: Unpack[Target]) -> NDArray[Any]:
    """Decode an image that `open_image` opened.  Returns uint8 (height, width, channels).

    Errors: UnusableImage when the image is damaged or truncated, and those of `pixels_from_image`.
    """
    try:
        return pixels_from_image(image, **target)
    except UnusableImage:
        raise
    # A damaged file can raise any exception inside a decoder.
    except Exception as exc:
        raise UnusableImage(f"the {image.format} image is damaged or truncated: {exc}") from exc


def pixels_to_compute(image: Any, *, height: int, width: int, resize: str, crop_pct: float = 1.0) -> int:
    """Return the number of pixels of an opened image before or after resizing, whichever is more; decodes no pixel.

    Errors: UnusableImage when the rule would make the image too large, or less than 1 pixel wide or high.
    """
    fit, _ = RESAMPLING[resize]
    resized = _resized_size(image.size, height=height, width=width, fit=fit, crop_pct=crop_pct)
    _require_possible(image.size, resized, fit=fit)
    columns, rows = image.size
    return max(int(columns * rows), resized[0] * resized[1])


def _require_few_parts(data: bytes) -> None:
    """Refuse a JPEG or PNG file that has so many parts that Pillow would take seconds to open or to decode the file."""
    if data.startswith(b"\xff\xd8"):
        scans, segments = _jpeg_parts(data)
        counts = (("scans", scans, MAX_SCANS), ("segments", segments, MAX_SEGMENTS))
    elif data.startswith(b"\x89PNG"):
        data_chunks, others = _png_parts(data)
        counts = (("chunks of pixels", data_chunks, MAX_DATA_CHUNKS), ("other chunks", others, MAX_SEGMENTS))
    else:
        return
    for what, count, maximum in counts:
        if count > maximum:
            raise UnusableImage(f"the image has more than {maximum} {what}, the maximum of an image")


def _jpeg_parts(data: bytes) -> tuple[int, int]:
    """Return (scans, segments) of a JPEG image; counting stops above the maximum."""
    scans = segments = 0
    position = 2
    while scans <= MAX_SCANS and segments <= MAX_SEGMENTS and (match := _MARKER.search(data, position)):
        marker, position = data[match.end() - 1], match.end()
        if marker == _END_OF_IMAGE:
            break
        segments += 1
        scans += marker == _START_OF_SCAN
        if marker not in _WITHOUT_LENGTH:
            position += int.from_bytes(data[position : position + 2], "big")
    return scans, segments


def _png_parts(data: bytes) -> tuple[int, int]:
    """Return (chunks of pixels, other chunks) of a PNG image; counting stops above the maximum."""
    data_chunks = others = 0
    position = 8
    while position + 8 <= len(data) and data_chunks <= MAX_DATA_CHUNKS and others <= MAX_SEGMENTS:
        kind = data[position + 4 : position + 8]
        data_chunks += kind in (b"IDAT", b"fdAT")
        others += kind not in (b"IDAT", b"fdAT")
        if kind == b"IEND":
            break
        position += 12 + int.from_bytes(data[position : position + 4], "big")
    return data_chunks, others


def _has_16_bits(image: Any) -> bool:
    """Return whether an opened image is a PNG with 16 bits a channel; in colour, Pillow keeps only 8 of these bits."""
    return image.format == "PNG" and any(str(tile[3]).endswith(";16B") for tile in image.tile)


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
    """Convert, resize and crop an opened ``PIL.Image``.  Returns uint8 (height, width, channels).  Fields: `Target`.

    Errors: UnusableImage when the resize rule would make the image too large, or less than 1 pixel wide or high.
    """
    from PIL import Image

    mode = MODES[channels]
    fit, resampling = RESAMPLING[resize]
    converted = fitted(
        image if image.mode == mode else image.convert(mode),  # convert would copy the pixels
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

    fit: stretch, center, squash, border or shortest, as at the top of this file.
    resampling: a ``PIL.Image.Resampling``.
    Errors: as for `pixels_from_image`.  ValueError when ``fit`` is ``border`` and ``mean`` is None.
    """
    size = _resized_size(image.size, height=height, width=width, fit=fit, crop_pct=crop_pct)
    _require_possible(image.size, size, fit=fit)
    resized = image if size == image.size else image.resize(size, resampling)
    if size == (width, height):
        return resized
    left, top = _first(size[0], width, fit), _first(size[1], height, fit)
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
    if fit == "shortest" or (fit == "center" and scaled_width == scaled_height):
        # torchvision's Resize, which timm uses for squares, and transformers round the longer side down.
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


def _first(length: int, side: int, fit: str) -> int:
    """Return the first pixel of the crop in an image of ``length`` pixels; at most 0 if the image is padded."""
    if fit == "shortest":
        return (length - side) // 2
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
