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

from gmmvit_deploy.preprocess import MAX_IMAGE_BYTES, UnusableImage, tensor_from_pixels
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


def test_jpeg_is_what_pillow_decodes() -> None:
    data = encoded(photo(32, 32), "JPEG", quality=80)
    np.testing.assert_array_equal(rgb(32).pixels_from_bytes(data), np.asarray(Image.open(io.BytesIO(data))))


@pytest.mark.parametrize("size", [(64, 64), (31, 47), (500, 20), (1, 1)])
def test_resizes_as_training_does(size: tuple[int, int]) -> None:
    image = photo(*size)
    expected = image.resize((32, 32), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(rgb(32).pixels_from_bytes(encoded(image, "PNG")), np.asarray(expected))


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "LA", "1", "CMYK"])
def test_other_modes_become_rgb(mode: str) -> None:
    image = photo(32, 32, "RGB").convert("L").convert(mode) if mode == "LA" else photo(32, 32, mode)
    kind = "JPEG" if mode == "CMYK" else "PNG"
    data = encoded(image, kind)
    expected = Image.open(io.BytesIO(data)).convert("RGB")
    np.testing.assert_array_equal(rgb(32).pixels_from_bytes(data), np.asarray(expected))


def test_normalisation_has_the_bits_of_training() -> None:
    """ToTensor and Normalize as torch computes them: uint8 → float32 / 255, minus mean, over std."""
    pixels = np.asarray(photo(32, 32))
    scaled = torch.from_numpy(pixels.copy()).permute(2, 0, 1).to(torch.float32).div(255)
    expected = scaled.sub(torch.tensor(MEAN).reshape(3, 1, 1)).div(torch.tensor(STD).reshape(3, 1, 1))
    np.testing.assert_array_equal(tensor_from_pixels(pixels, MEAN, STD), expected.numpy())


def test_batches_normalise_row_by_row() -> None:
    pixels = np.stack([np.asarray(photo(8, 8, seed=seed)) for seed in range(3)])
    together = tensor_from_pixels(pixels, MEAN, STD)
    for row, alone in enumerate(pixels):
        np.testing.assert_array_equal(together[row], tensor_from_pixels(alone, MEAN, STD))


def png_bomb(width: int, height: int) -> bytes:
    """A PNG whose header promises far more than its bytes hold."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda: b"", "empty"),
        (lambda: b"these are no image bytes", "not a JPEG, PNG, WEBP or BMP image"),
        (lambda: encoded(photo(32, 32), "GIF"), "not a JPEG, PNG, WEBP or BMP image"),
        (lambda: encoded(photo(64, 64), "JPEG")[:-500], "the JPEG image is damaged or truncated"),
        (lambda: encoded(photo(64, 64), "PNG")[:-3000], "the PNG image is damaged or truncated"),
        (lambda: encoded(photo(64, 64), "BMP")[:-500], "the BMP image is damaged or truncated"),
        (lambda: png_bomb(8_000, 8_000), "the maximum is 50000000 pixels"),
        (lambda: png_bomb(60_000, 60_000), "too large"),
        (lambda: encoded(Image.fromarray(np.zeros((8, 8), np.uint16)), "PNG"), "more than 8 bits"),
        (lambda: bytes(MAX_IMAGE_BYTES + 1), "the maximum is"),
    ],
    ids=["empty", "text", "gif", "cut jpeg", "cut png", "cut bmp", "bomb", "huge bomb", "16 bit", "heavy"],
)
def test_unusable_bytes_are_refused_with_a_reason(data: Callable[[], bytes], message: str) -> None:
    with pytest.raises(UnusableImage, match=message):
        rgb(32).pixels_from_bytes(data())
