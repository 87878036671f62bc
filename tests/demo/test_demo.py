from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gmmvit_cli.progress import LINE_MARK
from gmmvit_deploy.bundle.artifacts import Bundle, open_bundle
from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.demo.models import DIGITS_SPEC, OwnModel
from gmmvit_deploy.demo.run import run_demo
from gmmvit_deploy.errors import GmmvitError
from gmmvit_deploy.exporting.variants import variant_from_bundle
from gmmvit_deploy.images.data.open import open_data
from gmmvit_deploy.inference.cores import int8_saturates
from gmmvit_deploy.inference.precision import Precision
from gmmvit_deploy.parity.check import check_parity
from gmmvit_deploy.parity.options import ParityOptions
from gmmvit_deploy.parity.report import ParityReport
from gmmvit_deploy.runtimes.engines.card import open_engine
from gmmvit_deploy.runtimes.programs.image_batches import open_images
from gmmvit_deploy.runtimes.runners.chosen import choose_runner
from gmmvit_deploy.runtimes.runners.open import default_runners, open_runner
from tests.cli.terminal import done, gmmvit_here

pytestmark = [pytest.mark.integration, pytest.mark.nightly, pytest.mark.timeout(900)]  # a test waits for the whole demo


@dataclass(frozen=True)
class Demo:
    """steps: of the demo, each with name and result.  top1: who classified → the accuracy.  lines: of stderr."""

    path: Path
    steps: list[dict[str, Any]]
    top1: dict[str, float]
    lines: list[str]

    @property
    def bundle(self) -> Bundle:
        return open_bundle(self.path / "bundle")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """The whole demo, run once; its model is the only trained model of the tests."""
    out = tmp_path_factory.mktemp("demo") / "out"
    command = [sys.executable, "-m", "gmmvit_cli.main", "demo", "--json", "--output", str(out)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert answer.returncode == 0, answer.stderr
    result = json.loads(answer.stdout)
    return Demo(out, result["steps"], result["top1"], answer.stderr.splitlines())


def test_demo_from_training_to_served_answers(demo: Demo) -> None:
    path = demo.path
    (engine,) = (path / "bundle" / "engines").iterdir()
    assert [proof.fused for proof in open_engine(engine).card.attentions] == [True] * DIGITS_SPEC.depth
    expected = {"train", "export", "convert", "build", "parity", "serve", "classify grpc", "classify http", "bench"}
    assert expected <= {step["name"] for step in demo.steps}
    assert load_checkpoint(path / "checkpoint.pth").spec == DIGITS_SPEC
    assert len(demo.bundle.manifest.masks) == DIGITS_SPEC.depth
    assert len(list((path / "images").glob("*/*.png"))) == 360
    assert "<svg" in (path / "parity.html").read_text()
    (bench,) = (step["result"] for step in demo.steps if step["name"] == "bench")
    for runner in ("eager", *default_runners(demo.bundle)[0], "triton-grpc", "triton-http"):
        assert re.search(rf"\b{re.escape(runner)} [\d,]+", bench)
    assert "VALID" in bench
    assert "triton-grpc + decoding" in (path / "bench.html").read_text()
    assert [entry.name for entry in path.parent.iterdir()] == ["out"]


def test_the_demo_prints_progress_alone(demo: Demo) -> None:
    assert [line for line in demo.lines if not line.startswith(LINE_MARK)] == []


def test_accuracy_is_the_same_number_from_pytorch_to_the_live_server(demo: Demo) -> None:
    names = ("eager", *default_runners(demo.bundle)[0], "triton-grpc", "triton-http")
    assert {f"{name}, by parity" for name in names} <= set(demo.top1)
    assert {str(choose_runner(demo.bundle).runner), "Triton, grpc", "Triton, http"} <= set(demo.top1)  # on PNG bytes
    assert len(set(demo.top1.values())) == 1
    assert min(demo.top1.values()) >= 0.95


def calibrated(demo: Demo, folder: Path, images: str) -> Bundle:
    """Return a copy of the demo's bundle with int8 graphs, calibrated on 256 images."""
    shutil.copytree(demo.bundle.path, folder / "bundle")
    bundle = open_bundle(folder / "bundle")
    variant_from_bundle(bundle, "int8", calibration=open_images(bundle, images, limit=256))
    return bundle


def judged(bundle: Bundle, precision: Precision, data: str, **options: Any) -> ParityReport:
    with open_runner("onnxruntime", bundle, precision=precision) as runner:
        return check_parity(bundle, [runner], ParityOptions(data=open_data(data), **options))


def test_fp16_on_held_out_digits(demo: Demo) -> None:
    report = judged(demo.bundle, "fp16", "digits", localize=True)
    assert not report.failed, report.failures()
    accuracy = report.runners[0].check("accuracy")
    low, high = accuracy.details["top1"]["interval"]
    assert -0.02 < low < accuracy.details["top1"]["difference"] < high < 0.02
    # 360 images are too few to detect a loss of 0.1 %, unless each margin is larger than what rounding can change.
    by_margins = accuracy.details["nearest_to_changing"] < 1
    assert (accuracy.verdict, accuracy.details["by_margins"]) == ("passed" if by_margins else "undecided", by_margins)
    assert judged(demo.bundle, "fp16", "digits", gate=0.98).passed


@pytest.fixture(scope="module")
def in_int8(demo: Demo, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return calibrated(demo, tmp_path_factory.mktemp("int8"), "digits#train")


@pytest.mark.skipif(bool(int8_saturates()), reason=int8_saturates())
def test_int8_on_held_out_digits(in_int8: Bundle) -> None:
    report = judged(in_int8, "int8", "digits", gate=0.98)
    assert report.passed, report.failures()
    low, high = report.runners[0].check("accuracy").details["top1"]["interval"]
    assert low < 0 < high
    calibration = report.runners[0].check("calibration").details
    assert calibration["db"] > calibration["recorded_db"] - 3
    assert max(calibration["saturated"].values()) < 0.001


def test_int8_calibrated_on_noise_is_caught(demo: Demo, tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (256, 32, 32, 3), dtype=np.uint8)
    np.savez(tmp_path / "noise.npz", images=noise)
    report = judged(calibrated(demo, tmp_path, str(tmp_path / "noise.npz")), "int8", "digits")
    calibration = report.runners[0].check("calibration")
    assert calibration.verdict == "failed"
    assert "dB on images of its calibration (256 images of" in calibration.reasons[0]
    assert "noise.npz); expected at most 6 dB less" in calibration.reasons[0]


@pytest.mark.skipif(bool(int8_saturates()), reason=int8_saturates())
def test_too_few_images_fail_only_where_that_is_asked(in_int8: Bundle) -> None:
    few = ("parity", in_int8.path, "--runner", "onnxruntime:int8", "--data", "digits", "--limit", "50")
    answer = done(gmmvit_here(*few))
    reason = "too few images to decide"
    assert (
        f"undecided: onnxruntime:int8-static: accuracy: {reason}: of 50 images, only PyTorch is right on 0"
        in answer.out
    )
    assert answer.out.splitlines()[-1] == "passed, but some checks are undecided"
    asked = gmmvit_here(*few, "--require-accuracy")
    assert asked.status == 1
    assert f"--require-accuracy: onnxruntime: {reason}" in asked.err
    enough = gmmvit_here(*few[:-2], "--gate", "0.98", "--require-accuracy")
    assert (enough.status, enough.out.splitlines()[-1]) == (0, "passed")


def test_a_demo_that_does_not_learn_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OwnModel, "epochs", 1)
    with pytest.raises(GmmvitError, match="expected at least 95%"):
        run_demo(tmp_path / "demo")
    assert list(tmp_path.iterdir()) == []
