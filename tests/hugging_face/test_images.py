"""The preprocessing of a folder gives the tensors of transformers' image processors, and the server's rules take it.

Expected are the tensors of ``AutoImageProcessor`` with Pillow, bit for bit, and with torchvision, within its own
rounding: torchvision resizes 8-bit tensors with other arithmetic than Pillow.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

pytest.importorskip("transformers")
import transformers
from transformers.image_processing_backends import PilBackend, TorchvisionBackend
from transformers.models.auto.image_processing_auto import get_image_processor_class_from_name

from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.errors import CheckpointError
from gmmvit_deploy.exporting.onnx_from_model import onnx_from_model
from gmmvit_deploy.images.spec import ImageSpec
from gmmvit_deploy.models.families.hugging_face.images import _CLASSES, Preprocessing, preprocessing_from
from gmmvit_deploy.models.folding.fold import fold
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.runtimes.programs.onnxruntime import program_from_onnx
from tests.hugging_face.folders import LABELS, edited, processed, saved
from tests.timm.test_to_triton import picture
from tests.uneven_attention import perturbed

pytestmark = pytest.mark.integration

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
    known = preprocessing_from(fields, where="preprocessor_config.json", model_type="vit", channels=3)
    assert known is not None
    return known


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


def test_images_that_are_not_resized_leave_the_rule_to_the_user() -> None:
    preprocessing = stated({"image_processor_type": VIT, "do_resize": False})
    assert (preprocessing.size, preprocessing.resize) == (None, None)
    assert preprocessing.mean == (0.5, 0.5, 0.5)


@pytest.mark.parametrize("name", _CLASSES)
def test_the_image_processors_do_what_the_rules_compute(name: str) -> None:
    """Another version of transformers may change an operation of a class; the rules then no longer hold."""
    own = get_image_processor_class_from_name(f"{name}Pil") or get_image_processor_class_from_name(name)
    backend = PilBackend if issubclass(own, PilBackend) else TorchvisionBackend
    operations = ("process_image", "resize", "center_crop", "rescale", "normalize", "_preprocess")
    changed = {operation for operation in operations if getattr(own, operation) is not getattr(backend, operation)}
    assert changed == {
        "BeitImageProcessor": {"_preprocess"},  # maps of labels, which only segmentation has
        "ConvNextImageProcessor": {"resize", "_preprocess"},
        "DINOv3ViTImageProcessor": {"_preprocess"},  # scales the pixels before it resizes
        "MobileViTImageProcessor": {"_preprocess"},  # reverses the channels, and does not normalise
    }.get(name, set())


def mobilevit(folder: Path, **fields: Any) -> Any:
    """Write a MobileViT whose logits depend on the image; return the network."""
    torch.manual_seed(0)
    sizes = {"image_size": 64, "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [4, 4, 8, 8, 8, 8, 16]}
    labels = {"id2label": dict(enumerate(LABELS)), "label2id": {label: i for i, label in enumerate(LABELS)}}
    config = transformers.MobileViTConfig(**sizes, **labels, num_attention_heads=2)
    network = transformers.MobileViTForImageClassification(config)
    with torch.no_grad():
        perturbed(network)
        for module in network.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.momentum = None  # the statistics become those of the following images
        network.train()(torch.rand(16, 3, 64, 64))
    network.eval().save_pretrained(folder)
    processor = {"size": {"shortest_edge": 72}, "crop_size": {"height": 64, "width": 64}, **fields}
    transformers.MobileViTImageProcessor(**processor).save_pretrained(folder)
    return network


@pytest.mark.parametrize("reversed_channels", [True, False], ids=["BGR", "RGB"])
@pytest.mark.first(1)
def test_the_channels_are_in_the_order_of_the_image_processor(reversed_channels: bool, tmp_path: Path) -> None:
    network = mobilevit(tmp_path, do_flip_channel_order=reversed_channels)
    loaded = load_checkpoint(tmp_path)
    known = loaded.images
    image = ImageSpec(
        height=64, width=64, channels=3, mean=known.mean, std=known.std, resize=known.resize, crop_pct=known.crop_pct
    )  # type: ignore[arg-type]  # ImageSpec checks the rule
    pixels = image.pixels_from_image(PICTURES[0])
    with torch.inference_mode():
        expected = network(processed(tmp_path, PICTURES[0])).logits
        other = network(processed(tmp_path, PICTURES[0]).flip(1)).logits
        logits = loaded.model(torch.from_numpy(image.tensor_from_pixels(pixels))[None])
    assert float((other - expected).abs().max()) > 1e-2
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-6)
    folded = fold(loaded.model)
    assert bool(folded.passes["reverse_channels"]) == reversed_channels
    ir.save(onnx_from_model(folded.model, preprocessing=image, max_batch=8), tmp_path / "model.onnx")
    answer = program_from_onnx(tmp_path / "model.onnx").run(pixels[None])
    np.testing.assert_allclose(answer, expected.numpy(), rtol=0, atol=1e-5)


def test_without_its_file_the_order_of_the_channels_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mobilevit(tmp_path / "net")
    file = tmp_path / "net" / "preprocessor_config.json"
    file.unlink()
    with pytest.raises(
        CheckpointError, match=r"preprocessor_config\.json: no such file; .* reverses the channels"
    ) as caught:
        load_checkpoint(tmp_path / "net")
    assert not load_checkpoint(tmp_path / "net", LoadHints(only_tensors=True)).spec.bgr
    command = shlex.split(caught.value.hint.partition("type ")[2])
    exec(command[2], {})  # noqa: S102 - a user types it
    assert load_checkpoint(tmp_path / "net").spec.bgr


def test_dinov3_scales_the_pixels_before_it_resizes(tmp_path: Path) -> None:
    fields = {"image_processor_type": "DINOv3ViTImageProcessorFast", "size": SQUARE}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "dinov3_vit"}))
    spec = spec_of(stated(fields))
    for image in PICTURES:
        ours = spec.tensor_from_pixels(spec.pixels_from_image(image))
        difference = np.abs(ours - processed(tmp_path, image, backend="torchvision")[0].numpy())
        assert difference.max() < (1.001 if image.size != (32, 32) else 1e-4) / (255 * min(spec.std or ()))
    with pytest.raises(CheckpointError, match="does not limit the values after this filter"):
        stated({**fields, "resample": 3})


def test_the_image_processor_inside_processor_config(tmp_path: Path) -> None:
    folder = saved("vit", tmp_path / "vit")
    own = json.loads((folder / "preprocessor_config.json").read_text())
    nested = {"image_processor": {**own, "image_mean": [0.1, 0.2, 0.3]}, "processor_class": "CLIPProcessor"}
    (folder / "processor_config.json").write_text(json.dumps(nested))
    assert transformers.AutoImageProcessor.from_pretrained(folder, backend="pil").image_mean == (0.1, 0.2, 0.3)
    loaded = load_checkpoint(folder)
    assert (loaded.images.mean, loaded.images.origins["mean"]) == ((0.1, 0.2, 0.3), "processor_config.json")
    edited(folder, "processor_config.json", image_processor=...)
    assert load_checkpoint(folder).images.mean == (0.5, 0.5, 0.5)


def test_the_sizes_inside_vision_config(tmp_path: Path) -> None:
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 48}
    parts = {"vision_config": {**sizes, "image_size": 32, "patch_size": 8}, "text_config": sizes}
    config = transformers.CLIPConfig(**parts, id2label={0: "a", 1: "b"}, label2id={"a": 0, "b": 1})
    transformers.CLIPForImageClassification(config).save_pretrained(tmp_path)
    loaded = load_checkpoint(tmp_path)
    assert (loaded.spec.image_shape, loaded.spec.first_heads) == ((32, 32), 3)
    assert loaded.taken_from == {"image_size": "config.json"}
