"""Compare the preprocessing with timm's transform for evaluation: all pixels and tensors must be equal bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from gmmvit_deploy.errors import ImageError, InputError
from gmmvit_deploy.images.data.images import ArrayImages
from gmmvit_deploy.images.resize_rules import RESIZE_RULES, ResizeRule, fit_of, resize_rule_from_timm
from gmmvit_deploy.images.spec import ImageSpec
from gmmvit_deploy.inference.preprocess import MAX_IMAGE_PIXELS, MODES, UnusableImage
from tests.inference.test_preprocess import encoded, photo

pytest.importorskip("timm")

GOLDEN = Path(__file__).parents[1] / "golden" / "timm" / "timm_transforms.json"
RECORD = json.loads(GOLDEN.read_text())
MEAN, STD = tuple(RECORD["mean"]), tuple(RECORD["std"])
MODES_OF_TIMM = ("center", "squash", "border")
RULES_OF_TIMM = [rule for rule in RESIZE_RULES if fit_of(rule) in MODES_OF_TIMM]


def spec_of(case: dict[str, Any], channels: int = 3) -> ImageSpec:
    height, width = case["input_size"][1:]
    return ImageSpec(
        height=height,
        width=width,
        channels=channels,
        mean=MEAN[:1] * channels if channels != 3 else MEAN,
        std=STD[:1] * channels if channels != 3 else STD,
        resize=resize_rule_from_timm(case["crop_mode"], case["interpolation"]),
        crop_pct=case["crop_pct"],
    )


def by_timm(image: Image.Image, spec: ImageSpec) -> tuple[np.ndarray, np.ndarray]:
    """Return (pixels, tensor) as timm computes them."""
    from timm.data.transforms_factory import create_transform

    assert spec.normalisation is not None
    mode, interpolation = spec.resize.split("-")
    results = [
        create_transform(
            input_size=spec.tensor_shape,
            is_training=False,
            interpolation=interpolation,
            mean=spec.mean,
            std=spec.std,
            crop_pct=spec.crop_pct,
            crop_mode=mode,
            normalize=normalize,
        )(image.convert(spec.mode))
        for normalize in (False, True)
    ]
    pixels, tensor = (result.numpy() for result in results)
    return np.moveaxis(pixels, 0, -1), tensor


def assert_equals_timm(image: Image.Image, spec: ImageSpec) -> None:
    pixels, tensor = by_timm(image, spec)
    ours = spec.pixels_from_bytes(encoded(image, "PNG"))
    np.testing.assert_array_equal(ours, pixels)
    np.testing.assert_array_equal(ours, spec.pixels_from_image(image))
    np.testing.assert_array_equal(spec.tensor_from_pixels(ours), tensor)


@pytest.mark.parametrize("name", RECORD["cases"])
def test_recorded_transforms(name: str) -> None:
    spec = spec_of(RECORD["cases"][name])
    with np.load(GOLDEN.with_suffix(".npz")) as arrays:
        count = sum(key.startswith("image") for key in arrays)
        assert count == 4
        for index in range(count):
            pixels = spec.pixels_from_bytes(encoded(Image.fromarray(arrays[f"image{index}"]), "PNG"))
            np.testing.assert_array_equal(pixels, arrays[f"{name}.{index}"])
            if (tensor := f"{name}.{index}.tensor") in arrays:
                np.testing.assert_array_equal(spec.tensor_from_pixels(pixels), arrays[tensor])


@pytest.mark.parametrize("channels", MODES)
@pytest.mark.parametrize("kind", ["L", "LA", "RGB", "RGBA", "P"])
def test_channels(channels: int, kind: str) -> None:
    image = photo(45, 31).convert("L").convert(kind) if kind == "LA" else photo(45, 31, kind)
    for crop_mode in MODES_OF_TIMM:
        case = {"input_size": (channels, 20, 28), "crop_pct": 0.9, "interpolation": "bicubic", "crop_mode": crop_mode}
        assert_equals_timm(image, spec_of(case, channels))


@settings(max_examples=200, deadline=None)
@given(
    size=st.tuples(st.integers(1, 500), st.integers(1, 120)),
    side=st.tuples(st.integers(1, 48), st.integers(1, 48)),
    square=st.booleans(),
    crop_pct=st.floats(0.2, 1.0) | st.sampled_from([0.875, 0.9, 0.95, 1.0, 224 / 256, 0.8]),
    rule=st.sampled_from(RULES_OF_TIMM),
    grey=st.booleans(),
)
def test_any_size(
    size: tuple[int, int], side: tuple[int, int], square: bool, crop_pct: float, rule: ResizeRule, grey: bool
) -> None:
    channels = 1 if grey else 3
    height, width = (side[0], side[0]) if square else side
    spec = ImageSpec(
        height=height,
        width=width,
        channels=channels,
        mean=MEAN[:channels],
        std=STD[:channels],
        resize=rule,
        crop_pct=crop_pct,
    )
    image = photo(*size)
    try:
        spec.pixels_from_image(image)
    except UnusableImage:
        with pytest.raises(ValueError, match="height and width must be > 0"):
            by_timm(image, spec)
        return
    assert_equals_timm(image, spec)


def test_the_padding_has_the_colour_of_the_mean() -> None:
    spec = ImageSpec(height=8, width=8, channels=3, mean=MEAN, std=STD, resize="border-bilinear")
    pixels = spec.pixels_from_image(Image.new("RGB", (16, 4), (255, 255, 255)))
    assert pixels[:3].reshape(-1, 3).tolist() == pixels[5:].reshape(-1, 3).tolist() == [[124, 116, 104]] * 24
    assert (pixels[3:5] == 255).all()


def test_an_image_that_resizing_would_make_huge_is_refused() -> None:
    """A line of 100,000 pixels by 1 pixel, resized to cover 224×224, would have 5 billion pixels."""
    spec = ImageSpec(height=224, width=224, channels=1, mean=(0.5,), std=(0.5,), resize="center-bicubic")
    line = Image.new("L", (100_000, 1))
    message = f"and 22400000×224 pixels after resizing by the rule center; the maximum is {MAX_IMAGE_PIXELS} pixels"
    with pytest.raises(UnusableImage, match=message):
        spec.pixels_from_bytes(encoded(line, "PNG"))
    array = np.zeros((1, 1, 100_000), np.uint8)
    with pytest.raises(ImageError, match=r"lines\[0\]: the image is 100000×1 pixels"):
        ArrayImages("lines", array, None).pixels(0, spec)


def test_an_image_that_resizing_would_make_empty_is_refused() -> None:
    spec = ImageSpec(height=32, width=32, channels=1, mean=(0.5,), std=(0.5,), resize="border-bicubic")
    message = "the image is 100×1 pixels, and 32×0 pixels after resizing by the rule border; expected at least 1 pixel"
    with pytest.raises(UnusableImage, match=message):
        spec.pixels_from_bytes(encoded(Image.new("L", (100, 1)), "PNG"))


@pytest.mark.parametrize("crop_pct", [0, -0.5, 1.0001, 2, float("nan"), float("inf"), "0.9", None, True])
def test_crop_pct_outside_its_range(crop_pct: Any) -> None:
    with pytest.raises(InputError, match="image crop_pct: expected a number above 0 and at most 1, got "):
        ImageSpec(height=8, width=8, channels=3, resize="center-bicubic", crop_pct=crop_pct)


@pytest.mark.parametrize("crop_pct", [1e-4, 1e-310])
def test_a_crop_from_a_huge_image_is_refused(crop_pct: float) -> None:
    with pytest.raises(InputError, match="an image would be resized to more than 50000000 pixels before the crop"):
        ImageSpec(height=8, width=8, channels=3, resize="squash-bicubic", crop_pct=crop_pct)


def test_the_names_of_timm() -> None:
    assert resize_rule_from_timm(None, "bicubic") == resize_rule_from_timm("", "bicubic") == "center-bicubic"
    assert resize_rule_from_timm("border", "bilinear") == "border-bilinear"
    with pytest.raises(InputError, match="timm's crop_mode: expected border, center or squash, got 'corner'"):
        resize_rule_from_timm("corner", "bicubic")
    for name in ("nearest", "lanczos", "box", "hamming", "random"):
        with pytest.raises(InputError, match=f"timm's interpolation: expected bicubic or bilinear, got '{name}'"):
            resize_rule_from_timm("center", name)
