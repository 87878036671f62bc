from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gmmvit_deploy.bundle.golden import GoldenSet
from gmmvit_deploy.images.spec import ImageSpec
from gmmvit_deploy.parity._image_mistakes import pixel_mistakes
from tests.inference.test_preprocess import encoded, photo

STRETCH = ImageSpec(height=24, width=32, channels=3, mean=(0.5, 0.4, 0.3), std=(0.2, 0.2, 0.2))
CENTER = replace(STRETCH, resize="center-bicubic", crop_pct=0.9)
BORDER = replace(STRETCH, resize="border-bicubic", crop_pct=0.94)
IMAGES = tuple(
    encoded(photo(*size, mode), "PNG")
    for size, mode in (((60, 41), "RGB"), ((25, 70), "L"), ((32, 24), "RGB"), ((16, 12), "P"))
)


def names_of(images: tuple[bytes, ...], recorded: ImageSpec, pixels: np.ndarray) -> list[str]:
    """Return the names of all mistakes that give ``pixels`` instead of the pixels of ``recorded``."""
    nothing = np.zeros(0)
    golden = GoldenSet(
        inputs=nothing,
        tensors=nothing,
        logits=nothing,
        images=images,
        image_pixels=np.stack([recorded.pixels_from_bytes(image) for image in images]),
        image_logits=nothing,
    )
    return [name for name, made in pixel_mistakes(golden, recorded) if np.array_equal(made, pixels)]


@pytest.mark.parametrize(
    ("recorded", "changes", "name"),
    [
        (STRETCH, {"resize": "stretch-bicubic"}, "resized with bicubic instead of bilinear"),
        (
            STRETCH,
            {"resize": "center-bilinear", "crop_pct": 0.875},
            "fitted by center with crop_pct 0.875 instead of stretch",
        ),
        (CENTER, {"crop_pct": 1.0}, "fitted by center with crop_pct 1 instead of center with crop_pct 0.9"),
        (
            CENTER,
            {"resize": "stretch-bilinear", "crop_pct": 1.0},
            "resized with bilinear instead of bicubic, fitted by stretch instead of center with crop_pct 0.9",
        ),
        (
            BORDER,
            {"mean": (0.0, 0.0, 0.0)},
            "fitted by border with crop_pct 0.94, padded with black instead of border with crop_pct 0.94",
        ),
    ],
)
def test_a_mistake_is_named(recorded: ImageSpec, changes: dict[str, Any], name: str) -> None:
    made = replace(recorded, **changes)
    names = names_of(IMAGES, recorded, np.stack([made.pixels_from_bytes(image) for image in IMAGES]))
    assert names[0] == name


@pytest.mark.parametrize("channels", [1, 3])
def test_other_filters_of_pillow_are_named(channels: int) -> None:
    recorded = replace(STRETCH, channels=channels, mean=(0.5,) * channels, std=(0.2,) * channels)
    made = []
    for image in IMAGES:
        with Image.open(io.BytesIO(image)) as opened:
            resized = opened.convert(recorded.mode).resize((32, 24), Image.Resampling.LANCZOS)
            made.append(np.asarray(resized).reshape(recorded.pixels_shape))
    assert names_of(IMAGES, recorded, np.stack(made))[0] == "resized with lanczos instead of bilinear"
