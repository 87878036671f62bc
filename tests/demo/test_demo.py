from __future__ import annotations

from pathlib import Path

import pytest

from gmmvit_deploy.artifacts import open_bundle
from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.demo import run as module
from gmmvit_deploy.demo.digits import DIGITS_SPEC, load_digit_images
from gmmvit_deploy.demo.run import run_demo
from gmmvit_deploy.engines.card import open_engine
from gmmvit_deploy.errors import GmmvitError, OutputError

pytestmark = pytest.mark.server


def test_demo_from_training_to_served_answers(tmp_path: Path) -> None:
    seen: list[str] = []
    result = run_demo(tmp_path / "demo", on_step=seen.append)
    assert seen == [step.name for step in result.steps]
    (engine,) = (tmp_path / "demo" / "bundle" / "engines").iterdir()
    assert [proof.fused for proof in open_engine(engine).card.attentions] == [True] * DIGITS_SPEC.depth
    assert {
        "train",
        "export",
        "convert",
        "build",
        "parity onnxruntime",
        "serve",
        "classify grpc",
        "classify http",
    } <= set(seen)
    assert len(set(result.top1.values())) == 1  # the same number from PyTorch to the live server
    assert min(result.top1.values()) >= 0.95
    assert load_checkpoint(tmp_path / "demo" / "checkpoint.pth").spec == DIGITS_SPEC
    assert len(open_bundle(tmp_path / "demo" / "bundle").manifest.masks) == DIGITS_SPEC.depth
    assert len(list((tmp_path / "demo" / "images").glob("*/*.png"))) == 360
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]


def test_demo_keeps_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="exists"):
        run_demo(tmp_path)


def test_a_demo_that_does_not_learn_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EPOCHS", 1)
    with pytest.raises(GmmvitError, match="at least 95% was wanted"):
        run_demo(tmp_path / "demo")
    assert list(tmp_path.iterdir()) == []


def test_held_out_digits_are_not_trained_on() -> None:
    digits = load_digit_images()
    assert (len(digits.train_classes), len(digits.held_out_classes)) == (1437, 360)
    assert set(digits.held_out_classes) == set(range(10))
