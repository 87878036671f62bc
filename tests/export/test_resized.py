"""Export a model of timm for another image size than in training: bundle, golden logits, parity and messages."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gmmvit_deploy.bundle.artifacts import MANIFEST_FILE, Bundle, open_bundle
from gmmvit_deploy.checkpoints.weights import model_from_bundle
from gmmvit_deploy.images.data.open import open_data
from gmmvit_deploy.models.families.timm.spec import TimmSpec
from gmmvit_deploy.parity.check import check_parity
from gmmvit_deploy.parity.options import ParityOptions
from gmmvit_deploy.parity.page import summary_of
from gmmvit_deploy.runtimes.runners.open import open_runners
from tests.cli.terminal import Gmmvit

timm = pytest.importorskip("timm")
pytestmark = pytest.mark.integration

VIT = Path(__file__).parents[1] / "golden" / "timm" / "timm_vit.pth.tar"
WHY = "the model was resized from 32 × 32 to 48 × 48 pixels, position embeddings resampled by deit's algorithm"


@pytest.fixture(scope="module")
def answer(gmmvit: Gmmvit, tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    out = tmp_path_factory.mktemp("resized") / "bundle"
    options = ("--set", "weights=trained", "--resize-to", "48", "--set", "interpolation=deit", "--max-batch", "4")
    images = ("--labels", ",".join("abcdefghij"), "--resize", "center-bicubic", "--crop-pct", "0.9")
    return gmmvit("export", VIT, "-o", out, *options, *images), out


@pytest.fixture(scope="module")
def bundle(answer: tuple[subprocess.CompletedProcess[str], Path]) -> Bundle:
    assert answer[0].returncode == 0, answer[0].stderr
    return open_bundle(answer[1])


@pytest.mark.nightly
def test_export_states_the_resizing(
    answer: tuple[subprocess.CompletedProcess[str], Path], bundle: Bundle, gmmvit: Gmmvit
) -> None:
    text = " ".join(answer[0].stdout.split())
    assert "resized from 32 × 32 to 48 × 48 pixels, position embeddings resampled by deit's algorithm; to check" in text
    stored = json.loads((bundle.path / MANIFEST_FILE).read_text())["spec"]
    assert (stored["resized_from"], stored["interpolation"], stored["image_size"]) == ([32, 32], "deit", 48)
    assert bundle.manifest.image.resize_text == "center-bicubic, crop_pct 0.9"
    shown = gmmvit("inspect", bundle.weights_path).stdout
    assert "resized from" in shown
    assert "[32, 32]" in shown


def test_the_golden_logits_are_those_of_the_resized_network(bundle: Bundle) -> None:
    inputs, logits = bundle.golden()
    model = model_from_bundle(bundle.manifest, bundle.weights_path)
    assert isinstance(model.spec, TimmSpec)
    network = timm.create_model(model.spec.architecture, **{**model.spec.model_args, "img_size": 48})
    network.load_state_dict({name.removeprefix("network."): value for name, value in model.state_dict().items()})
    tensors = torch.from_numpy(bundle.manifest.image.tensor_from_pixels(inputs))
    with torch.no_grad():
        expected = network.eval()(tensors).numpy()
    np.testing.assert_allclose(logits, expected, rtol=0, atol=10 * bundle.manifest.float32_noise)


def test_parity_without_images_is_undecided(bundle: Bundle) -> None:
    with open_runners(["onnxruntime"], bundle) as runners:
        report = check_parity(bundle, runners, ParityOptions())
    accuracy = report.runners[0].check("accuracy")
    assert (report.verdict, accuracy.verdict) == ("undecided", "undecided")
    assert accuracy.summary.startswith(f"{WHY}, and its accuracy at this size was not checked: ")
    assert "add --data" in accuracy.reasons[0]
    assert "resized from 32 × 32 to 48 × 48" in report.bundle["model"]
    assert any("its accuracy at this size was not checked" in line for line in summary_of(report).changes)
    assert {check.name for check in report.runners[0].checks if check.verdict == "undecided"} == {"accuracy"}


@pytest.mark.nightly
def test_parity_with_images_compares_top1(bundle: Bundle, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for label in bundle.manifest.labels:
        (tmp_path / label).mkdir()
        for index in range(2):
            pixels = generator.integers(0, 256, (60, 60, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / label / f"{index}.png")
    with open_runners(["onnxruntime"], bundle) as runners:
        report = check_parity(bundle, runners, ParityOptions(data=open_data(str(tmp_path))))
    accuracy = report.runners[0].check("accuracy")
    assert accuracy.details["images"] == 20
    assert accuracy.summary.startswith("top-1 ")
    assert f"; {WHY}: compare PyTorch's top-1 with the top-1 before the resizing" in accuracy.summary
