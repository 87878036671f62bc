from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from gmmvit_deploy.inference.preprocess import (
    MAX_DATA_CHUNKS,
    MAX_IMAGE_BYTES,
    MAX_SCANS,
    MAX_SEGMENTS,
    UnusableImage,
    open_image,
    pixels_to_compute,
    tensor_from_pixels,
)
from tests.conftest import rgb

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def photo(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise).convert(mode)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "BMP", "WEBP"])
def test_lossless_formats_give_the_pixels_themselves(kind: str) -> None:
    image = photo(32, 32)
    data = encoded(image, kind, **({"lossless": True} if kind == "WEBP" else {}))
    np.testing.assert_array_equal(rgb(32).pixels_from_bytes(data), np.asarray(image))


def test_normalisation_has_the_bits_of_training() -> None:
    """ToTensor and Normalize as torch computes them: uint8 → float32 / 255, minus mean, over std."""
    pixels = np.asarray(photo(32, 32))
    scaled = torch.from_numpy(pixels.copy()).permute(2, 0, 1).to(torch.float32).div(255)
    expected = scaled.sub(torch.tensor(MEAN).reshape(3, 1, 1)).div(torch.tensor(STD).reshape(3, 1, 1))
    np.testing.assert_array_equal(tensor_from_pixels(pixels, MEAN, STD), expected.numpy())


def png_chunk(kind: bytes, body: bytes = b"") -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, body: bytes, *, depth: int = 8, colour: int = 2, more: bytes = b"") -> bytes:
    """A PNG with these compressed bytes as its pixels, and ``more`` chunks before the pixels."""
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + more + png_chunk(b"IDAT", body) + png_chunk(b"IEND")


def png_bomb(width: int, height: int) -> bytes:
    """A PNG whose header promises far more than its bytes hold."""
    return png(width, height, zlib.compress(bytes(1000)))


def png_16_bits(colour: int, channels: int) -> bytes:
    return png(8, 8, zlib.compress(bytes(8 * (1 + 8 * channels * 2))), depth=16, colour=colour)


def progressive(*, scans: int, segments: int = 0) -> bytes:
    """A progressive JPEG with copies of its last scan, and with comments before its first scan."""
    data = encoded(photo(64, 64), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    repeated = data[:last] + data[last:-2] * scans + data[-2:]
    return repeated[:2] + b"\xff\xfe\x00\x02" * segments + repeated[2:]


UNUSABLE: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "empty"),
    "text": (lambda: b"these are no image bytes", "not a JPEG, PNG, WEBP or BMP image"),
    "gif": (lambda: encoded(photo(32, 32), "GIF"), "not a JPEG, PNG, WEBP or BMP image"),
    "cut jpeg": (lambda: encoded(photo(64, 64), "JPEG")[:-500], "the JPEG image is damaged or truncated"),
    "cut png": (lambda: encoded(photo(64, 64), "PNG")[:-3000], "the PNG image is damaged or truncated"),
    "cut bmp": (lambda: encoded(photo(64, 64), "BMP")[:-500], "the BMP image is damaged or truncated"),
    "bomb": (lambda: png_bomb(8_000, 8_000), "the maximum is 50000000 pixels"),
    "huge bomb": (lambda: png_bomb(60_000, 60_000), "too large"),
    "16 bit": (lambda: encoded(Image.fromarray(np.zeros((8, 8), np.uint16)), "PNG"), "more than 8 bits"),
    "16 bit colour": (lambda: png_16_bits(2, 3), r"more than 8 bits per channel \(mode RGB\)"),
    "16 bit colour and alpha": (lambda: png_16_bits(6, 4), "more than 8 bits"),
    "16 bit grey and alpha": (lambda: png_16_bits(4, 2), "more than 8 bits"),
    "scans": (lambda: progressive(scans=200), "more than 100 scans"),
    "segments": (lambda: progressive(scans=1, segments=2000), "more than 1000 segments"),
    "chunks": (lambda: png(8, 8, b"", more=png_chunk(b"tEXt", b"a\0b") * 2000), "more than 1000 other chunks"),
    "chunks of pixels": (lambda: png(8, 8, b"", more=png_chunk(b"IDAT") * 10_001), "more than 10000 chunks of pixels"),
    "heavy": (lambda: bytes(MAX_IMAGE_BYTES + 1), "the maximum is"),
}


@pytest.mark.parametrize(("data", "message"), UNUSABLE.values(), ids=UNUSABLE)
def test_unusable_bytes_are_refused_with_a_reason(data: Callable[[], bytes], message: str) -> None:
    with pytest.raises(UnusableImage, match=message):
        rgb(32).pixels_from_bytes(data())


@pytest.mark.parametrize(
    "data",
    [
        lambda: progressive(scans=MAX_SCANS - 20),
        lambda: progressive(scans=1, segments=MAX_SEGMENTS - 30),
        # A photograph with a video after the image: the video's bytes look like markers.
        lambda: encoded(photo(64, 64), "JPEG") + b"\xff\xda\x00\x02" * 10 * MAX_SEGMENTS,
        lambda: png(2, 2, zlib.compress(bytes(14)), more=png_chunk(b"tEXt", b"a\0b") * (MAX_SEGMENTS - 10)),
        lambda: b"".join(
            [
                png(2, 2, b"")[:33],
                *(png_chunk(b"IDAT", bytes([byte])) for byte in zlib.compress(bytes(14))),
                png_chunk(b"IDAT") * (MAX_DATA_CHUNKS - 100),
                png_chunk(b"IEND"),
            ]
        ),
    ],
    ids=["scans", "segments", "bytes after the image", "chunks", "chunks of pixels"],
)
def test_many_parts_below_the_maximum_are_decoded(data: Callable[[], bytes]) -> None:
    assert rgb(32).pixels_from_bytes(data()).shape == (32, 32, 3)


def test_pixels_are_counted_without_decoding() -> None:
    """The bytes of the pixels are missing, so only the header is read."""
    cut = png(7000, 7000, b"")
    with open_image(cut) as image:
        assert pixels_to_compute(image, height=32, width=32, resize="stretch-bilinear") == 49_000_000
    with pytest.raises(UnusableImage, match="damaged or truncated"):
        rgb(32).pixels_from_bytes(cut)


def test_pixels_after_resizing_count_too() -> None:
    """A line of 9,000 × 10 pixels becomes 201,600 × 224 before the crop."""
    with open_image(png(9000, 10, b"")) as image:
        assert pixels_to_compute(image, height=224, width=224, resize="center-bilinear") == 201_600 * 224
    with open_image(png(90_000, 10, b"")) as image, pytest.raises(UnusableImage, match="after resizing"):
        pixels_to_compute(image, height=224, width=224, resize="center-bilinear")
