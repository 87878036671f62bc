from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.images.spec import ImageSpec
from tests.inference.test_preprocess import encoded, photo

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


@pytest.mark.parametrize("kind", ["L", "LA", "RGB", "RGBA", "P", "1", "CMYK"])
@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (2, "LA"), (3, "RGB"), (4, "RGBA")])
def test_files_become_what_pillow_converts_them_to(kind: str, channels: int, mode: str) -> None:
    spec = ImageSpec(height=20, width=28, channels=channels)
    image = photo(40, 30, "RGB").convert("L").convert(kind) if kind == "LA" else photo(40, 30, kind)
    data = encoded(image, "JPEG" if kind == "CMYK" else "PNG")
    pixels = spec.pixels_from_bytes(data)
    assert (pixels.shape, pixels.dtype) == ((20, 28, channels), np.uint8)
    with Image.open(io.BytesIO(data)) as opened:
        expected = np.asarray(opened.convert(mode).resize((28, 20), Image.Resampling.BILINEAR))
    np.testing.assert_array_equal(pixels, expected.reshape(20, 28, channels))


def test_sides_are_height_then_width() -> None:
    pixels = GREY.pixels_from_image(Image.new("L", (28, 20)))
    assert pixels.shape == GREY.pixels_shape == (20, 28, 1)
    tensor = GREY.tensor_from_pixels(np.full((3, *GREY.pixels_shape), 255, np.uint8))
    assert tensor.shape[1:] == GREY.tensor_shape == (1, 20, 28)
    np.testing.assert_array_equal(tensor, (np.float32(1) - np.float32(0.1)) / np.float32(0.3))
