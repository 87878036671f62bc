"""Networks of 1, 2 and 4 channels go the whole way: checkpoint → bundle → runners → parity → files → repository."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.checkpoints.loading import released_state_dict
from gmmvit_deploy.exporting.bundle_from_checkpoint import ExportOptions, bundle_from_checkpoint
from gmmvit_deploy.exporting.variants import variant_from_bundle
from gmmvit_deploy.images.data.images import ArrayImages
from gmmvit_deploy.images.datasets import DATASETS
from gmmvit_deploy.models.families import model_from_spec
from gmmvit_deploy.models.families.vit import ViTSpec
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.models.specs import MaskSpec, ModelSpec
from gmmvit_deploy.parity.check import check_parity
from gmmvit_deploy.parity.options import ParityOptions
from gmmvit_deploy.runtimes.runners.classify import BundleClassifier, classify_files
from gmmvit_deploy.runtimes.runners.eager import EagerRunner
from gmmvit_deploy.runtimes.runners.onnxruntime import OnnxRuntimeRunner
from tests.cli.terminal import Gmmvit
from tests.models.families.small_specs import small_spec
from tests.parity.faults import rebuilt

pytestmark = pytest.mark.integration

LABELS = tuple("abcde")
MEAN, STD = (0.2, 0.45, 0.4, 0.7), (0.3, 0.25, 0.2, 0.35)
SPEC = ViTSpec(
    image_size=20,
    patch_size=5,
    classes=len(LABELS),
    dim=32,
    depth=2,
    heads=2,
    head_dim=16,
    mlp_dim=48,
    class_token=False,
    mask=MaskSpec(kind="gmm", kernels=3),
)


def saved_checkpoint(path: Path, spec: ModelSpec) -> Path:
    """Write a checkpoint in the released form whose answers depend on the image."""
    torch.manual_seed(11)
    model = model_from_spec(spec)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    torch.save({"model_state_dict": released_state_dict(model)}, path)
    return path


def options(channels: int, **changes: Any) -> ExportOptions:
    values: dict[str, Any] = {"mean": MEAN[:channels], "std": STD[:channels], "labels": LABELS, "max_batch": 8}
    return ExportOptions(**{**values, **changes})


def exported(folder: Path, channels: int, **changes: Any) -> Bundle:
    checkpoint = saved_checkpoint(folder / "model.pth", replace(SPEC, channels=channels))
    hints = LoadHints(channels=channels)
    return bundle_from_checkpoint(checkpoint, folder / "bundle", options(channels, **changes), hints=hints)


OTHERS = [pytest.param(channels, marks=pytest.mark.nightly) for channels in (2, 4)]


@pytest.fixture(scope="module", params=[1, *OTHERS], ids=lambda channels: f"{channels} channels")
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return exported(tmp_path_factory.mktemp("channels"), request.param)


def photo(mode: str, width: int = 31, height: int = 24) -> Image.Image:
    """Return a smooth, coloured image with an alpha channel, converted to the mode."""
    coarse = np.random.default_rng(3).integers(0, 256, (5, 5, 4), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).convert(mode)


def logits_of_files(bundle: Bundle, files: list[Path]) -> np.ndarray:
    """Preprocess with Pillow and PyTorch only: convert to the mode of the network, stretch, normalise."""
    image = bundle.manifest.image
    tensors = []
    for file in files:
        mode = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}[image.channels]
        with Image.open(file) as opened:
            resized = opened.convert(mode).resize((image.width, image.height), Image.Resampling.BILINEAR)
        pixels = torch.from_numpy(np.array(resized)).reshape(image.height, image.width, image.channels)
        mean, std = torch.tensor(image.mean), torch.tensor(image.std)
        tensors.append(((pixels.to(torch.float32) / 255 - mean) / std).permute(2, 0, 1))
    with EagerRunner(bundle) as eager, torch.inference_mode():
        return eager.model(torch.stack(tensors)).numpy()


def test_parity_passes(small: Bundle) -> None:
    images = np.stack([np.asarray(photo("RGB", 40, 30).rotate(10 * turn)) for turn in range(6)])
    data = ArrayImages("photographs", images, None)
    with OnnxRuntimeRunner(small) as runner:
        report = check_parity(small, [runner], ParityOptions(data=data, localize=True))
    assert report.passed, report.failures()
    assert "normalises with the manifest's mean and std" in report.runners[0].check("preprocessing").summary


@pytest.mark.parametrize("mode", ["L", "LA", "RGB", "RGBA", "P"])
def test_files_of_any_mode_are_classified(mode: str, small: Bundle, tmp_path: Path) -> None:
    photo(mode).save(tmp_path / "photo.png")
    with BundleClassifier(small) as classifier:
        (answer,) = classify_files(classifier, [tmp_path / "photo.png"], top=1)
        logits = classifier.logits([(tmp_path / "photo.png").read_bytes()])
    expected = logits_of_files(small, [tmp_path / "photo.png"])
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)
    assert answer.predictions[0].label == LABELS[int(expected.argmax())]


@pytest.mark.nightly
def test_a_wrong_normalisation_of_grey_images_is_named(tmp_path: Path) -> None:
    data = DATASETS["mnist"]
    bundle = exported(tmp_path, 1, mean=data.mean, std=data.std)
    spec = replace(bundle.manifest.image, mean=(0.1307,), std=(0.3081,))
    broken = rebuilt(bundle, tmp_path / "broken", lambda model: None, preprocessing=spec)
    with OnnxRuntimeRunner(broken) as runner:
        report = check_parity(broken, [runner])
    failed = {check.name: check.reasons for check in report.runners[0].checks if check.verdict == "failed"}
    for name in ("preprocessing", "numeric"):
        assert "mean and std of MNIST's training images" in failed[name][-1]


@pytest.mark.nightly
def test_command_line(gmmvit: Gmmvit, tmp_path: Path) -> None:
    checkpoint = saved_checkpoint(tmp_path / "grey.pth", replace(SPEC, channels=1, classes=10))
    assert "type --set channels=1, which fits the file" in gmmvit("inspect", checkpoint).stderr
    described = json.loads(gmmvit("inspect", checkpoint, "--set", "channels=1", "--image-size", "20", "--json").stdout)
    assert described["spec"]["channels"] == 1
    answer = gmmvit("inspect", checkpoint, "--set", "channels=1", "--image-size", "28")
    assert "--image-size 28 contradicts the file: its tensors show 20" in answer.stderr
    arguments = ("export", checkpoint, "-o", tmp_path / "bundle", "--set", "channels=1")
    assert "image mean: expected 1 numbers" in gmmvit(*arguments, "--dataset", "digits").stderr
    answer = gmmvit(*arguments, "--dataset", "mnist", "--resize", "stretch-bicubic", "--max-batch", "2", "--json")
    assert answer.returncode == 0, answer.stderr
    manifest = json.loads(answer.stdout)["manifest"]
    image = {"height": 20, "width": 20, "channels": 1, "mean": [0.0], "std": [1.0], "resize": "stretch-bicubic"}
    image["crop_pct"] = 1.0
    assert (manifest["format"], manifest["image"]) == ("gmmvit-bundle/4", image)
    logits = {"name": "logits", "shape": [10], "meaning": "class logits", "pooling": "", "unit_length": False}
    assert manifest["outputs"] == [logits]
    assert (manifest["task"], manifest["unused_keys"]) == ("single-label", {})


@pytest.mark.nightly
def test_swin_exports_other_channels(tmp_path: Path) -> None:
    spec = replace(small_spec("swin"), channels=1)
    checkpoint = saved_checkpoint(tmp_path / "model.pth", spec)
    bundle = bundle_from_checkpoint(checkpoint, tmp_path / "bundle", options(1), hints=LoadHints(heads=2, channels=1))
    assert bundle.manifest.spec == spec
    variant_from_bundle(bundle, "fp16")  # the forms for engines, too
    inputs, logits = bundle.golden()
    with OnnxRuntimeRunner(bundle) as runner:
        np.testing.assert_allclose(runner.run(inputs), logits, rtol=0, atol=2e-5)
