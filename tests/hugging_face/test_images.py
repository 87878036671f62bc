"""The preprocessing of a folder gives the tensors of transformers' image processors, and the server's rules take it.

Expected are the tensors of ``AutoImageProcessor`` with Pillow, bit for bit, and with torchvision, within its own
rounding: torchvision resizes 8-bit tensors with other arithmetic than Pillow.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("transformers")
from transformers.image_processing_backends import PilBackend
from transformers.models.auto.image_processing_auto import get_image_processor_class_from_name

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.images.spec import ImageSpec
from gmmvit_deploy.models.families.hugging_face.images import _CLASSES, Preprocessing, preprocessing_from
from tests.hugging_face.folders import processed
from tests.timm.test_to_triton import picture

VIT, DEIT, BIT = "ViTImageProcessor", "DeiTImageProcessor", "BitImageProcessor"
SQUARE, SHORTEST = {"height": 32, "width": 32}, {"shortest_edge": 37}
CASES: dict[str, dict[str, Any]] = {
    "stretched": {"image_processor_type": VIT, "size": SQUARE},
    "bicubic": {"image_processor_type": VIT, "size": SQUARE, "resample": 3},
    "oblong": {"image_processor_type": VIT, "size": {"height": 24, "width": 40}},
    "older name": {"feature_extractor_type": "ViTFeatureExtractor", "size": 32, "do_resize": True},
    "fast": {"image_processor_type": "ViTImageProcessorFast", "size": SQUARE, "crop_size": None, "device": None},
    "no class": {"size": SQUARE},
    "squashed": {"image_processor_type": DEIT, "size": {"height": 36, "width": 36}, "crop_size": SQUARE},
    "nothing to crop": {"image_processor_type": DEIT, "size": SQUARE, "crop_size": 32},
    "shortest": {"image_processor_type": BIT, "size": SHORTEST, "crop_size": SQUARE},
    "shortest, as a number": {"image_processor_type": BIT, "size": 33, "crop_size": 32, "do_convert_rgb": True},
    "only the crop": {"image_processor_type": BIT, "size": {"shortest_edge": 32}, "crop_size": SQUARE, "resample": 2},
    "crop_pct": {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 32}, "crop_pct": 0.9},
    "whole side": {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 384}},
    "rescaled to [-1, 1]": {
        "image_processor_type": VIT,
        "size": SQUARE,
        "rescale_factor": 1 / 127.5,
        "image_mean": 1.0,
        "image_std": [1.0, 1.0, 1.0],
    },
    "not rescaled": {
        "image_processor_type": VIT,
        "size": SQUARE,
        "do_rescale": False,
        "image_mean": [123.7, 116.3, 103.5],
        "image_std": [58.4, 57.1, 57.4],
    },
    "not normalised": {"image_processor_type": VIT, "size": SQUARE, "do_normalize": False},
}
"""Name of a test → the content of ``preprocessor_config.json``."""
SIZES = ((91, 40), (33, 120), (32, 32), (19, 13), (640, 481), (57, 64))
PICTURES = [picture(width, height, "RGB", seed) for seed, (width, height) in enumerate(SIZES)]
ROUNDED = {"rescaled to [-1, 1]", "not rescaled", "not normalised"}
"""Cases whose mean and std are converted to those of pixels / 255; the tensors differ in the last bits."""


def stated(fields: dict[str, Any]) -> Preprocessing:
    return preprocessing_from(fields, where="preprocessor_config.json", model_type="vit", channels=3)


def spec_of(preprocessing: Preprocessing) -> ImageSpec:
    assert preprocessing.size is not None
    height, width = preprocessing.size
    return ImageSpec(
        height=height,
        width=width,
        channels=3,
        mean=preprocessing.mean,
        std=preprocessing.std,
        resize=preprocessing.resize,  # type: ignore[arg-type]  # ImageSpec checks the rule
        crop_pct=preprocessing.crop_pct,
    )


@pytest.mark.parametrize("name", CASES)
def test_the_tensors_are_those_of_the_image_processor(name: str, tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(CASES[name]))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    preprocessing = stated(CASES[name])
    spec = spec_of(preprocessing)
    step = 1 / (255 * min(preprocessing.std))  # of the tensor, between two neighbouring values of a pixel
    for image in PICTURES:
        ours = spec.tensor_from_pixels(spec.pixels_from_image(image))
        with_pillow = processed(tmp_path, image)[0].numpy()
        with_torchvision = processed(tmp_path, image, backend="torchvision")[0].numpy()
        if name in ROUNDED:
            np.testing.assert_allclose(ours, with_pillow, rtol=0, atol=4e-7 * np.abs(with_pillow).max())
        else:
            np.testing.assert_array_equal(ours, with_pillow)
        difference = np.abs(ours - with_torchvision)
        assert difference.mean() < 0.5 * step
        if preprocessing.resize is not None and preprocessing.resize.endswith("bilinear"):
            assert difference.max() < 1.001 * step


def test_only_the_crop_of_transformers_rounds_down() -> None:
    image = Image.fromarray(np.arange(32 * 33, dtype=np.uint8).reshape(32, 33), "L")
    sizes = {"height": 32, "width": 32, "channels": 1}
    down = ImageSpec(**sizes, resize="shortest-bilinear").pixels_from_image(image)
    np.testing.assert_array_equal(down[..., 0], np.asarray(image)[:, :32])
    wider = Image.fromarray(np.tile(np.arange(35, dtype=np.uint8), (32, 1)), "L")
    assert ImageSpec(**sizes, resize="shortest-bilinear").pixels_from_image(wider)[0, 0, 0] == 1
    assert ImageSpec(**sizes, resize="center-bilinear").pixels_from_image(wider)[0, 0, 0] == 2
    with pytest.raises(InputError, match="shortest-bilinear is for square images, got 32×40"):
        ImageSpec(**{**sizes, "width": 40}, resize="shortest-bilinear")


def test_images_that_are_not_resized_leave_the_rule_to_the_user() -> None:
    preprocessing = stated({"image_processor_type": VIT, "do_resize": False})
    assert (preprocessing.size, preprocessing.resize) == (None, None)
    assert preprocessing.mean == (0.5, 0.5, 0.5)


@pytest.mark.parametrize("name", _CLASSES)
def test_the_image_processors_do_what_the_rules_compute(name: str) -> None:
    """Another version of transformers may change an operation of a class; the rules then no longer hold."""
    own = get_image_processor_class_from_name(f"{name}Pil")
    operations = ("process_image", "resize", "center_crop", "rescale", "normalize", "_preprocess")
    changed = {operation for operation in operations if getattr(own, operation) is not getattr(PilBackend, operation)}
    assert changed == {
        "BeitImageProcessor": {"_preprocess"},  # maps of labels, which only segmentation has
        "ConvNextImageProcessor": {"resize", "_preprocess"},
    }.get(name, set())
