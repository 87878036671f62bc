"""After an upgrade, parity says what changed since ``gmmvit optimize``, and whether its choice still holds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.bundle.choices import read_choices, write_choice
from gmmvit_deploy.bundle.gates import Gate
from gmmvit_deploy.inference.precision import Precision
from gmmvit_deploy.parity._verdict import Check
from gmmvit_deploy.parity.check import check_parity
from gmmvit_deploy.parity.choice import with_choice
from gmmvit_deploy.parity.options import ParityOptions
from gmmvit_deploy.parity.report import SCHEMA_PATH, ParityReport
from gmmvit_deploy.runtimes.runners.chosen import runtime_versions
from gmmvit_deploy.runtimes.runners.open import open_runner
from tests.choices import chosen_bundle
from tests.parity.test_faults import labelled_by


def judged(
    bundle: Bundle,
    *,
    images: int = 0,
    gate: float = 0.5,
    same_images: bool = True,
    precision: Precision = "int8",
    kept: float | None = None,
) -> Check:
    """Return the check ``choice``.  gate: of the choice.  kept: share of decisions, below the gate of parity itself."""
    own = 0.5 if precision == "int8" else None
    options = ParityOptions(data=labelled_by(bundle, images) if images else None, keep_decisions=own)
    with open_runner("onnxruntime", bundle, precision=precision) as runner:
        report = check_parity(bundle, [runner], options)
    if kept is not None:
        (of_runner,) = report.runners
        checks = [
            replace(check, verdict="failed", reasons=("changed",), details={**check.details, "agreement": kept})
            if check.name == "decisions"
            else check
            for check in of_runner.checks
        ]
        report = replace(report, runners=(replace(of_runner, checks=tuple(checks)),))
    ((choice,), _) = read_choices(bundle.path)
    sha256 = report.data["sha256"] if report.data is not None and same_images else "ab"
    of_choice = replace(choice.images, sha256=sha256)
    write_choice(bundle.path, replace(choice, gate=Gate(keep_decisions=gate), images=of_choice))
    report = with_choice(bundle, report)
    if images:
        jsonschema.validate(json.loads(json.dumps(report.to_json())), json.loads(SCHEMA_PATH.read_text()))
    return check_of(report)


def check_of(report: ParityReport) -> Check:
    return next(check for check in report.checks if check.name == "choice")


def test_the_versions_that_changed_are_named_and_the_choice_is_judged_again(
    precise_bundle: Bundle, tmp_path: Path
) -> None:
    versions = {"onnxruntime": "1.0.0", "gmmvit-deploy": "0.0.1", "openvino": "1"}  # ONNX Runtime loads one of them
    bundle = chosen_bundle(precise_bundle, tmp_path / "b", "onnxruntime:int8", versions=versions)
    now = runtime_versions()
    changed = [f"onnxruntime 1.0.0 → {now['onnxruntime']}", f"gmmvit-deploy 0.0.1 → {now['gmmvit-deploy']}"]
    check = judged(bundle)
    assert (check.verdict, check.details["changed"]) == ("undecided", changed)  # no image shows the decisions
    assert all(words in check.summary for words in changed)
    assert "type --data folder:val" in check.reasons[0]
    assert judged(bundle, images=40, same_images=False).verdict == "undecided"
    check = judged(bundle, images=40)
    assert (check.verdict, check.details["changed"]) == ("passed", changed)
    assert "kept decisions 0.9900 then, " in check.summary


def test_another_form_of_int8_is_not_the_choice(precise_bundle: Bundle, tmp_path: Path) -> None:
    versions = {"onnxruntime": "1.0.0"}
    bundle = chosen_bundle(precise_bundle, tmp_path / "b", "onnxruntime:int8-static", versions=versions)
    with open_runner("onnxruntime", bundle, precision="int8") as runner:
        report = check_parity(bundle, [runner])
    (of_runner,) = report.runners
    assert "add onnxruntime" not in str(check_of(with_choice(bundle, report)).reasons)
    other = replace(report, runners=(replace(of_runner, runner=replace(of_runner.runner, form="mixed")),))
    reasons = check_of(with_choice(bundle, other)).reasons
    assert "add onnxruntime:int8-static to --runner to judge it with what is installed now" in reasons


@pytest.mark.nightly
def test_a_choice_that_misses_its_gate_now_fails(precise_bundle: Bundle, tmp_path: Path) -> None:
    bundle = chosen_bundle(precise_bundle, tmp_path / "b", "onnxruntime:int8")
    assert judged(bundle).verdict == "passed"  # with the same versions
    few = judged(bundle, images=40, gate=0.99)
    assert few.verdict == "undecided"  # 40 images cannot show so much
    check = judged(bundle, images=40, gate=0.95, kept=0.9)
    assert check.verdict == "failed"
    assert "kept decisions 0.9000, below the gate 0.95" in check.reasons[0]
    assert f"type gmmvit optimize {bundle.path}" in check.reasons[-1]


def test_the_gate_of_the_choice_decides_not_that_of_parity_and_float32_is_judged_again(
    precise_bundle: Bundle, tmp_path: Path
) -> None:
    bundle = chosen_bundle(precise_bundle, tmp_path / "int8", "onnxruntime:int8")
    assert judged(bundle, images=40, kept=0.9).verdict == "passed"
    bundle = chosen_bundle(precise_bundle, tmp_path / "fp32", "onnxruntime", versions={"onnxruntime": "1.0.0"})
    check = judged(bundle, images=40, precision="fp32")
    assert (check.verdict, check.details["now"]) == ("passed", None)  # no gate judges float32
