from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.images.data.other_formats import as_served, pixels_of_file
from gmmvit_deploy.images.spec import ImageSpec
from gmmvit_deploy.inference.preprocess import UnusableImage
from tests.conftest import rgb

GREY = ImageSpec(height=20, width=28, channels=1, mean=(0.1,), std=(0.3,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"channels": 5, "mean": (0.0,) * 5, "std": (1.0,) * 5}, "image channels: expected 1, 2, 3 or 4, got 5"),
        ({"mean": (0.1, 0.2, 0.3)}, "image mean: expected 1 numbers, one for each channel of the network, got 3"),
        ({"std": (0.0,)}, "image std: expected numbers above 0, got 0"),
        ({"std": None}, "got mean without std"),
        ({"resize": "crop"}, "resize rule: expected stretch-bilinear, .* or border-bicubic, got 'crop'"),
        ({"resize": "shortest-bilinear"}, "resize rule shortest-bilinear is for square images, got 20×28"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_refuses_what_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(GREY, **changes)


def test_sides_are_height_then_width() -> None:
    pixels = GREY.pixels_from_image(Image.new("L", (28, 20)))
    assert pixels.shape == GREY.pixels_shape == (20, 28, 1)
    tensor = GREY.tensor_from_pixels(np.full((3, *GREY.pixels_shape), 255, np.uint8))
    assert tensor.shape[1:] == GREY.tensor_shape == (1, 20, 28)
    np.testing.assert_array_equal(tensor, (np.float32(1) - np.float32(0.1)) / np.float32(0.3))


# ---- files of formats that a server refuses become PNG files with the same pixels ------------------------------------


NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 4), dtype=np.uint8))


def saved(image: Image.Image, file_format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()


FRAMES = {"save_all": True, "append_images": [NOISE.convert("RGB").rotate(90)]}
FILES = {
    "GIF of several frames": saved(NOISE.convert("RGB"), "GIF", **FRAMES),
    "transparent GIF": saved(NOISE.convert("P"), "GIF", transparency=7),
    "grey GIF": saved(NOISE.convert("L"), "GIF"),
    **{
        f"TIFF {mode}": saved(NOISE.convert("RGB").convert(mode), "TIFF", compression="tiff_lzw")
        for mode in ("1", "L", "P", "RGB", "RGBA", "CMYK")
    },
    "TIFF of several pages": saved(NOISE.convert("RGB"), "TIFF", **FRAMES),
    "turned TIFF": saved(NOISE.convert("RGB"), "TIFF", tiffinfo={274: 6}),
    "PPM": saved(NOISE.convert("RGB"), "PPM"),
    "PGM": saved(NOISE.convert("L"), "PPM"),
    "JPEG 2000": saved(NOISE.convert("RGB"), "JPEG2000"),
    **{name: saved(NOISE.convert("RGB"), name) for name in ("DIB", "PCX", "SGI", "DDS", "TGA", "ICO")},
    "XBM": saved(NOISE.convert("1"), "XBM"),
}


@pytest.mark.parametrize("name", FILES)
def test_pixels_are_those_of_pillow(name: str) -> None:
    served = as_served(FILES[name])
    assert served.startswith(b"\x89PNG")
    expected = np.asarray(Image.open(io.BytesIO(FILES[name])).convert("RGB"))
    assert rgb(32).pixels_from_bytes(served).tobytes() == expected.tobytes()
    assert pixels_of_file(FILES[name], rgb(32)).tobytes() == expected.tobytes()


def test_the_size_of_the_png_limits_servers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A TIFF of a camera has fewer bytes than its PNG."""
    data = FILES["TIFF RGB"]
    for module in ("inference.preprocess", "images.data.other_formats"):
        monkeypatch.setattr(f"gmmvit_deploy.{module}.MAX_IMAGE_BYTES", 1000)
    assert pixels_of_file(data, rgb(32)).shape == (32, 32, 3)
    with pytest.raises(UnusableImage, match=r"was converted to PNG for the server, and the PNG has \d{4} bytes"):
        as_served(data)


@pytest.mark.parametrize("data", [saved(NOISE, "PNG"), saved(NOISE.convert("RGB"), "JPEG"), b"", b"P5", b"text"])
def test_other_bytes_are_unchanged(data: bytes) -> None:
    assert as_served(data) is data


def wide() -> bytes:
    """Return a TIFF of 16 bits a channel, of which Pillow keeps 8."""
    data = bytearray(saved(Image.new("RGB", (2, 1)), "TIFF"))
    at = data.index(b"\x08\x00\x08\x00\x08\x00")  # BitsPerSample
    data[at : at + 6] = b"\x10\x00\x10\x00\x10\x00"
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (FILES["GIF of several frames"][:900], "the GIF image is damaged or truncated"),
        (FILES["PPM"][:-1], "the PPM image is damaged or truncated"),
        (saved(Image.new("I;16", (4, 4)), "TIFF"), "more than 8 bits per channel"),
        (saved(Image.new("F", (4, 4)), "TIFF"), "more than 8 bits per channel"),
        (wide(), "more than 8 bits per channel"),
        (b"P6 9000 9000 255\n", "9000×9000 pixels; the maximum is 50000000"),
        (b"P6 90000 90000 255\n", "the image is too large"),
    ],
)
def test_unusable_files_are_refused_with_the_reason(data: bytes, why: str) -> None:
    with pytest.raises(UnusableImage, match=why):
        as_served(data)
