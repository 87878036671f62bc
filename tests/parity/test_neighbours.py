"""Parity counts the nearest neighbours that a runner's features keep."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from gmmvit_deploy.bundle.artifacts import Bundle, open_bundle
from gmmvit_deploy.exporting.variants import variant_from_bundle
from gmmvit_deploy.images.data.images import ArrayImages
from gmmvit_deploy.parity import _neighbours
from gmmvit_deploy.parity._verdict import Check
from gmmvit_deploy.parity.check import check_parity
from gmmvit_deploy.parity.options import ParityOptions
from gmmvit_deploy.parity.report import SCHEMA_PATH
from gmmvit_deploy.runtimes.runners.onnxruntime import OnnxRuntimeRunner
from gmmvit_deploy.runtimes.runners.open import open_runner
from gmmvit_deploy.runtimes.runners.runner import Runner
from tests.conftest import photo_pixels
from tests.parity.faults import Altered

pytestmark = pytest.mark.integration


def photographs(count: int) -> ArrayImages:
    return ArrayImages("photographs", photo_pixels(6, count), None)


def checked(bundle: Bundle, runner: Runner, *, gate: float | None = None, count: int = 160) -> Check:
    with runner:
        options = ParityOptions(data=photographs(count), keep_neighbours=gate)
        report = check_parity(bundle, [runner], options)
    jsonschema.validate(report.to_json(), json.loads(SCHEMA_PATH.read_text()))
    return report.runners[0].check("neighbours")


@pytest.mark.parametrize("kind", ["features_bundle", "both_bundle"])
def test_float32_keeps_all_neighbours(kind: str, request: pytest.FixtureRequest) -> None:
    bundle = request.getfixturevalue(kind)
    assert checked(bundle, OnnxRuntimeRunner(bundle)).verdict == "skipped"
    check = checked(bundle, OnnxRuntimeRunner(bundle), gate=0.95)
    assert (check.verdict, check.details["images"]) == ("passed", 160)
    assert check.details["kept"] > 0.999


def test_every_second_of_many_images_is_kept(features_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_neighbours, "_MAX_IMAGES", 150)
    check = checked(features_bundle, OnnxRuntimeRunner(features_bundle), gate=0.9, count=220)
    assert (check.verdict, check.details["images"]) == ("passed", 110)


@pytest.mark.parametrize("name", ["openvino:int8-dynamic", "onnxruntime:fp16"])
def test_other_precisions_without_logits_have_a_gate(name: str, features_bundle: Bundle, tmp_path: Path) -> None:
    shutil.copytree(features_bundle.path, tmp_path / "bundle")
    bundle = open_bundle(tmp_path / "bundle")
    variant_from_bundle(bundle, "int8" if "int8" in name else "fp16")
    check = checked(bundle, open_runner(name, bundle))
    assert check.details["gate"] == 0.9
    assert 0.9 < check.details["kept"] <= 1
    low, high = check.details["interval"]
    assert low < check.details["kept"] <= high


def test_other_features_fail(features_bundle: Bundle) -> None:
    noise = np.random.default_rng(0)
    runner = Altered(features_bundle, lambda rows: rows + 0.1 * noise.standard_normal(rows.shape).astype(np.float32))
    check = checked(features_bundle, runner, gate=0.9)
    assert check.verdict == "failed"
    assert check.reasons == ("the precision changes too many neighbours",)


def test_what_cannot_be_judged_is_undecided(bundle: Bundle, features_bundle: Bundle) -> None:
    check = checked(bundle, OnnxRuntimeRunner(bundle), gate=0.9, count=8)
    assert (check.verdict, "the bundle has no features" in check.summary) == ("undecided", True)
    check = checked(features_bundle, OnnxRuntimeRunner(features_bundle), gate=0.9, count=99)
    assert (check.verdict, check.reasons) == ("undecided", ("too few images to decide: 99, expected at least 100",))
