"""optimize takes the fastest program that passes, says why it left the others out, and keeps the evidence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gmmvit_deploy.bundle.artifacts import Bundle, open_bundle
from gmmvit_deploy.bundle.cascades import read_cascade, write_cascade
from gmmvit_deploy.bundle.choices import Candidate, Choice, JudgedImages, Machine, read_choices, write_choice
from gmmvit_deploy.bundle.gates import Gate
from gmmvit_deploy.bundle.variants import forms_in, open_variant
from gmmvit_deploy.checkpoints.reading import MODEL_METADATA_KEY
from gmmvit_deploy.doctor import examine_bundle
from gmmvit_deploy.exporting import cascades as cascades_of_images
from gmmvit_deploy.exporting.bundle_from_checkpoint import bundle_from_checkpoint
from gmmvit_deploy.inference import DEFERRED
from gmmvit_deploy.inference.runner_name import RunnerName
from gmmvit_deploy.intervals import Measured
from gmmvit_deploy.models.families import spec_to_json
from gmmvit_deploy.optimize import _race, run
from gmmvit_deploy.optimize.page import page_of
from gmmvit_deploy.optimize.table import could_pass, passed_rows
from gmmvit_deploy.parity import _deferral
from gmmvit_deploy.parity._trained_accuracy import TrainedAccuracy
from gmmvit_deploy.parity._verdict import Check
from gmmvit_deploy.parity.check import check_parity
from gmmvit_deploy.parity.judgement import Judgement, judgement_of
from gmmvit_deploy.parity.options import ParityOptions
from gmmvit_deploy.parity.report import RunnerReport
from gmmvit_deploy.runtimes.engines.flavors import visible_gpu
from gmmvit_deploy.runtimes.runners.chosen import choose_runner
from gmmvit_deploy.runtimes.runners.onnxruntime import OnnxRuntimeRunner
from gmmvit_deploy.runtimes.runners.open import graph_of, open_runner
from tests.cli.terminal import Answer, gmmvit_here, refused
from tests.conftest import cifar_options, photo_pixels
from tests.pages import require_readable_page
from tests.parity.test_quantised import planted
from tests.planted.quantised import FAULTS
from tests.timm_graphs import timm_model

pytestmark = pytest.mark.integration
IMAGES = 520


def copied(bundle: Bundle, folder: Path) -> Bundle:
    shutil.copytree(bundle.path, folder / "bundle")
    return open_bundle(folder / "bundle")


@pytest.fixture(scope="module")
def labelled(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough images for the measured ratio to decide, labelled by the network itself."""
    path, images = tmp_path_factory.mktemp("gate") / "images.npz", photo_pixels(1, IMAGES)
    with open_runner("onnxruntime", bundle) as runner:
        labels = runner.rows(bundle.inputs_from_pixels(images)).argmax(1)
    np.savez(path, images=images, labels=labels)
    return path


@pytest.fixture(autouse=True)
def _int8_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test judges a time: int8 is twice as fast as float32, static int8 most, and all else half as fast."""

    def seconds(programs: Sequence[Callable[[], object]], **_: Any) -> list[list[float]]:
        speeds = []
        for program in programs:
            runner: Any = program.func.__self__
            program()
            speeds.append({"fp32": 1.0, "int8": 2.0 if runner.form == "dynamic" else 2.5}.get(runner.precision, 0.5))
        return [[1 / speed] * 8 for speed in speeds]

    monkeypatch.setattr(_race, "seconds_in_turn", seconds)


def only_cascades_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail int8 alone, as a stricter gate would: no cascade is judged beside an int8 that passes."""

    def judgement(report: RunnerReport, gate: Gate) -> Judgement:
        alone = report.runner.precision == "int8" and not report.runner.cascade
        return replace(judgement_of(report, gate), why_not="too many decisions change" if alone else "")

    monkeypatch.setattr(run, "judgement_of", judgement)


def of(choice: Choice, runner: str) -> Candidate:
    return next(one for one in choice.candidates if one.runner == RunnerName.parse(runner))


def optimized(bundle: Bundle, *arguments: str | Path) -> tuple[Choice, Answer]:
    answer = gmmvit_here("optimize", bundle.path, *arguments, columns=300)
    assert answer.status == 0, answer.err
    choices, why = read_choices(bundle.path)
    assert not why
    return choices[-1], answer


@pytest.mark.nightly
def test_the_choice_is_written_beside_the_proven_files(
    precise_bundle: Bundle, labelled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(TrainedAccuracy, "try_others")  # minutes for a large network, and no choice depends on it
    bundle = copied(precise_bundle, tmp_path)
    empty: Any = {"candidates": (), "versions": {}, "made_at": "", "base": RunnerName("onnxruntime")}
    other = Choice(machine=Machine(cpu="another", cores=64), goal="latency", batch=1, **empty)
    write_choice(bundle.path, other)
    choice, answer = optimized(
        bundle, "--data", f"array:{labelled}", "--gate", "0.5", "--report", tmp_path / "page.html"
    )
    best = choice.candidates[0]
    assert (best.passed, best.runner.precision, best.runner.form) == (True, "int8", "static")
    assert best.speed.low > 1
    assert best.judged.low <= best.judged.value <= best.judged.high
    assert (choice.gate.kind, choice.gate.min_share) == ("accuracy ratio", 0.5)
    assert choice.images.count == 500  # evenly spread over the 520
    assert choice.images.checked == 128
    assert [sum(buckets.values()) for buckets in choice.images.answers.values()] == [500, 500]
    float32 = next(one for one in choice.passed if one.runner.precision == "fp32")
    assert float32.judged is None
    assert [row[3:5] for row in passed_rows(choice) if row[0] == str(float32.runner)] == [
        (f"{choice.images.accuracy:.2%}", "as PyTorch")
    ]
    slow = of(choice, "onnxruntime:fp16")
    assert not slow.passed
    assert slow.reason.startswith("not faster than ")
    assert slow.judged is None  # it cannot win, so no image was spent on it
    assert read_choices(bundle.path)[0][0] == other
    assert open_bundle(bundle.path).sha256 == precise_bundle.sha256
    assert f"chosen: {best.runner}" in answer.out
    page = (tmp_path / "page.html").read_text()
    assert "CHOSEN" in page
    assert slow.reason in page
    assert "<svg" in page


@pytest.mark.nightly
def test_a_wrong_int8_graph_is_left_out(precise_bundle: Bundle, labelled: Path, tmp_path: Path) -> None:
    bundle = planted(precise_bundle, FAULTS["a range cut to a third"][0], tmp_path)
    choice, _ = optimized(bundle, "--data", f"array:{labelled}", "--gate", "0.01")
    wrong = of(choice, "onnxruntime:int8-static")
    assert not wrong.passed
    assert "its input saturates outside" in wrong.reason
    assert choice.candidates[0].runner.form in ("", "dynamic")
    assert wrong.graph_sha256 == open_variant(bundle, "int8", "static").sha256


@pytest.mark.nightly
def test_missing_forms_of_int8_are_tried_and_written_beside_what_was_there(
    precise_bundle: Bundle, tmp_path: Path
) -> None:
    bundle = copied(precise_bundle, tmp_path)
    before = {path: path.read_bytes() for path in bundle.path.rglob("*") if path.is_file()}
    np.savez(tmp_path / "x.npz", images=photo_pixels(3, 24))
    choice, _ = optimized(bundle, "--data", f"array:{tmp_path / 'x.npz'}")
    assert {path: path.read_bytes() for path in before} == before
    assert {path.name for path in bundle.path.rglob("*") if path.is_file() and path not in before} == {
        *("int8-dynamic.onnx", "int8-dynamic.json", "runners.json")
    }
    assert "--calibration" in of(choice, "openvino:int8-mixed").reason
    for form in ("static", "dynamic"):
        graph = graph_of(bundle, RunnerName.parse(f"openvino:int8-{form}"))
        assert graph.path == bundle.path / f"graphs/int8-{form}.onnx"
        assert graph.sha256 == of(choice, f"openvino:int8-{form}").graph_sha256
    assert graph_of(bundle, RunnerName.parse("openvino:int8")).form == "static"


def test_without_labels_decisions_decide_and_without_calibration_static_int8_is_left_out(
    bundle: Bundle, tmp_path: Path
) -> None:
    copy = copied(bundle, tmp_path)
    np.savez(tmp_path / "x.npz", images=photo_pixels(3, 24))
    choice, answer = optimized(copy, "--data", f"array:{tmp_path / 'x.npz'}")
    assert (choice.gate.kind, choice.gate.min_share) == ("kept decisions", 0.97)
    for form in ("static", "mixed"):
        missing = of(choice, f"openvino:int8-{form}")
        assert not missing.passed
        assert "--calibration" in missing.reason
    assert "--calibration" in answer.out
    dynamic = of(choice, "openvino:int8-dynamic")
    assert dynamic.images_to_settle is not None or dynamic.judged.high < 0.97
    assert "0.97" in dynamic.reason  # 24 images cannot show that 97 % of the decisions are kept
    assert choice.candidates[0].runner.precision == "fp32"
    written = json.loads((copy.path / "runners.json").read_text())
    assert [entry["machine"]["cpu"] for entry in written["machines"]] == [choice.machine.cpu]


def test_features_are_judged_by_the_neighbours_that_they_keep(features_bundle: Bundle, tmp_path: Path) -> None:
    copy = copied(features_bundle, tmp_path)
    np.savez(tmp_path / "x.npz", images=photo_pixels(3, 160))
    data = ("--data", f"array:{tmp_path / 'x.npz'}")
    error, hint = refused(gmmvit_here("optimize", copy.path, *data, "--keep-decisions", "0.9"))
    assert "it decides nothing" in error
    assert "--gate" in hint
    choice, answer = optimized(copy, *data, "--gate", "0.5", "--report", tmp_path / "page.html")
    assert (choice.gate.kind, choice.gate.min_share) == ("kept neighbours", 0.5)
    best = choice.candidates[0]
    assert (best.passed, best.runner.precision, best.runner.form) == (True, "int8", "dynamic")
    assert 0.5 < best.judged.low < best.judged.value < 1
    assert "neighbours" in answer.out
    assert "kept neighbours" in (tmp_path / "page.html").read_text()
    choice, _ = optimized(copy, *data, "--gate", "0.999")
    left_out = of(choice, "openvino:int8-dynamic")
    assert not left_out.passed
    assert "kept neighbours" in left_out.reason
    assert choice.passed[0].runner.precision == "fp32"
    judged = {check.name: check.detail for check in examine_bundle(copy, None)}["graphs/int8-dynamic.onnx"]
    assert f"openvino:int8-dynamic: kept neighbours {left_out.judged.value:.4f} (" in judged
    assert judged.endswith("gate 0.999")


@pytest.mark.nightly
def test_mixed_int8_of_features_keeps_neighbours(features_bundle: Bundle, tmp_path: Path) -> None:
    copy = copied(features_bundle, tmp_path)
    np.savez(tmp_path / "x.npz", images=photo_pixels(3, 240))
    words = ("convert", copy.path, "--precision", "int8", "--calibration", tmp_path / "x.npz")
    refused(gmmvit_here(*words, "--keep-decisions", "0.5"))
    answer = gmmvit_here(*words, "--keep-neighbours", "0.93", columns=300)
    assert answer.status == 0, answer.err
    assert "neighbours kept" in answer.out
    (form, *_) = [form for form in ("mixed", "static") if form in forms_in(copy, "int8")]
    calibration = open_variant(copy, "int8", form).record.calibration
    held = [row for row in calibration["curve"] if row["holds"]]
    assert held
    assert all(row["neighbours_interval"][0] >= 0.93 for row in held)


@pytest.mark.nightly
def test_with_calibration_every_form_is_tried_and_kept(
    bundle: Bundle, labelled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = copied(bundle, tmp_path)
    np.savez(tmp_path / "calibration.npz", images=photo_pixels(7, 64))
    arguments = ("--data", f"array:{labelled}", "--calibration", tmp_path / "calibration.npz", "--gate", "0.1")
    choice, _ = optimized(copy, *arguments)
    best = choice.candidates[0]
    assert (best.passed, best.runner.precision, best.runner.form) == (True, "int8", "static")
    assert best.graph_sha256 == open_variant(copy, "int8", "static").sha256
    assert {"static", "dynamic"} <= set(forms_in(copy, "int8"))
    slower = of(choice, "openvino:int8-dynamic")
    assert slower.reason == "slower than openvino:int8-static, which passes the gate, so it was not judged"
    assert slower.judged is None
    assert not any(each.runner.cascade for each in choice.candidates)  # slower than int8, which passes
    assert (copy.path / "graphs/int8.onnx").exists() == (visible_gpu() is not None)
    only_cascades_pass(monkeypatch)
    choice, _ = optimized(copy, *arguments)
    cascades = [each for each in choice.candidates if each.runner.cascade]
    static, dynamic = sorted(cascades, key=lambda each: each.runner.form == "dynamic")  # the fastest graphs
    assert "16 images of" in static.reason  # of its calibration images, too few set no range
    assert "a threshold needs 32" in static.reason
    assert dynamic.runner.form == "dynamic"


@pytest.mark.nightly
def test_a_cascade_is_judged_and_timed_on_images(
    precise_bundle: Bundle, labelled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_race, "_TIMED_BATCHES", {False: 662, True: 12})
    monkeypatch.setattr(_race, "_MIN_GAIN", 0.0)
    only_cascades_pass(monkeypatch)
    for module in (cascades_of_images, _deferral):
        monkeypatch.setattr(module, "chosen_threshold", lambda margins, losses, keep: float(np.median(margins)))
    copy = copied(precise_bundle, tmp_path)
    np.savez(tmp_path / "others.npz", images=photo_pixels(7, 96))
    page = tmp_path / "page.html"
    arguments = ("--data", f"array:{labelled}", "--calibration", tmp_path / "others.npz", "--keep-decisions", "0.9")
    choice, answer = optimized(copy, *arguments, "--report", page)
    cascade = next((each for each in choice.candidates if each.on_images), None)
    assert cascade is not None, [(each.reason, each.judged) for each in choice.candidates if each.runner.cascade]
    assert cascade.judged is not None
    assert cascade.on_images is not None
    assert 0.2 < cascade.on_images.deferred < 0.8
    assert cascade.on_images.p50 <= (cascade.on_images.p99 or 0)
    assert cascade.threshold == read_cascade(copy, cascade.runner, cascade.graph_sha256).threshold
    words = f"{cascade.runner}: float32 computed {cascade.on_images.deferred:.1%} of the images again"
    assert words in answer.out
    assert "Images that float32 computes again" in page.read_text()
    assert read_choices(copy.path)[0][0] == choice
    # A threshold that nobody judged is not taken.
    chosen = replace(choice, candidates=(replace(cascade, passed=True),))
    write_choice(copy.path, chosen)
    assert choose_runner(copy).runner == cascade.runner
    record = read_cascade(copy, cascade.runner, cascade.graph_sha256)
    write_cascade(copy, cascade.runner, replace(record, threshold=record.threshold * 2))
    assert "another threshold was judged" in choose_runner(copy).notes[0]


@pytest.mark.nightly
def test_a_plain_vit_merges_tokens_before_a_cascade(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_race, "_TIMED_BATCHES", {False: 662, True: 12})
    monkeypatch.setattr(_race, "_MIN_GAIN", 0.0)
    only_cascades_pass(monkeypatch)
    monkeypatch.setattr(cascades_of_images, "chosen_threshold", lambda margins, losses, keep: float(np.median(margins)))
    model = timm_model("196_patches")
    content = {"model_state_dict": model.state_dict(), MODEL_METADATA_KEY: json.dumps(spec_to_json(model.spec))}
    torch.save(content, tmp_path / "vit.pth")
    options = cifar_options(labels=tuple("abcdefghij"), resize="stretch-bilinear")
    bundle = bundle_from_checkpoint(tmp_path / "vit.pth", tmp_path / "bundle", options)
    for name, seed, count in (("data", 1, 300), ("others", 2, 128)):
        images = np.pad(photo_pixels(seed, count), ((0, 0), (0, 24), (0, 24), (0, 0)), "reflect")
        np.savez(tmp_path / f"{name}.npz", images=images)
    words = ("--data", f"array:{tmp_path / 'data.npz'}", "--calibration", tmp_path / "others.npz")
    choice, _ = optimized(bundle, *words, "--keep-decisions", "0.5")
    merged = [each for each in choice.candidates if each.runner.form == "merged"]
    assert {"int8-merged", "int8-merged+fp32"} <= {each.runner.arithmetic for each in merged}
    cascade = next(each for each in merged if each.runner.cascade)
    assert cascade.judged is not None, cascade.reason
    graph = open_variant(bundle, "int8", "merged")
    assert cascade.graph_sha256 == graph.sha256
    report = check_parity(bundle, [open_runner("openvino:int8-merged", bundle)], ParityOptions())
    (calibration,) = [check for check in report.runners[0].checks if check.name == "calibration"]
    assert (calibration.verdict, calibration.reasons) == ("passed", ())
    with open_runner(cascade.runner, bundle) as runner:
        assert 0 < runner.rows_all(bundle.inputs_from_pixels(images), batch=8)[DEFERRED].mean() < 1


def test_images_that_calibrate_do_not_judge(bundle: Bundle, labelled: Path) -> None:
    answer = gmmvit_here("optimize", bundle.path, "--data", f"array:{labelled}", "--calibration", labelled)
    refused(answer, "of its 512 images are also among the 500 images of --data")
    assert not (bundle.path / "runners.json").exists()


@pytest.mark.nightly
@pytest.mark.parametrize("goal", ["latency", "throughput"])
def test_a_program_that_is_wrong_for_single_images_is_left_out(
    goal: str, precise_bundle: Bundle, labelled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong_alone(self: OnnxRuntimeRunner, batch: np.ndarray) -> np.ndarray:
        logits = run(self, batch)
        if self.precision != "int8" or len(batch) > 1 or (batch == self.bundle.golden_rows()[0]).all((1, 2, 3)).any():
            return logits  # the reference inputs would show the fault before the images do
        return np.roll(logits, 1, axis=1)

    run = OnnxRuntimeRunner._run
    monkeypatch.setattr(OnnxRuntimeRunner, "_run", wrong_alone)
    bundle = copied(precise_bundle, tmp_path)
    words = ("--data", f"array:{labelled}", "--gate", "0.5", "--for", goal)
    choice, answer = optimized(bundle, *words)
    assert choice.images.batches == (1, 8)
    assert "judged on 500 images of" in answer.out
    assert "at batch 1 and 8" in answer.out
    wrong = of(choice, "onnxruntime:int8-static")
    assert not wrong.passed
    assert "accuracy ratio 0." in wrong.reason


def test_labels_that_cannot_judge_are_refused(
    precise_bundle: Bundle, labelled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Labels at random, or exchanged: int8 is right as often as PyTorch, whatever its answers are.

    They are refused before the minutes of conversion.
    """
    bundle = copied(precise_bundle, tmp_path)
    with np.load(labelled) as arrays:
        images, labels = arrays["images"], arrays["labels"]
    first, second = np.bincount(labels).argsort()[-2:]
    exchanged = np.select([labels == first, labels == second], [second, first], labels)
    for wrong, message in (
        (np.random.default_rng(0).permutation(labels), "these labels cannot judge accuracy: PyTorch is right on"),
        (exchanged, "the labels are probably permuted"),
    ):
        np.savez(tmp_path / "x.npz", images=images, labels=wrong)
        words = ("optimize", bundle.path, "--data", f"array:{tmp_path / 'x.npz'}", "--limit", "200")
        with monkeypatch.context() as patched:
            patched.delattr("gmmvit_deploy.optimize.run.convert_missing")
            refused(gmmvit_here(*words), message)
        assert not (bundle.path / "runners.json").exists()


def int8_report(images: int, kept: float, *others: Check) -> RunnerReport:
    """int8 that changes as many answers for the better as for the worse."""
    details = {"images": images, "top1": {"pytorch": 0.6, "runner": 0.6, "interval": [-0.02, 0.02]}, "wrong_labels": ""}
    decisions = {"inputs": images, "agreement": kept, "interval": [kept - 0.03, kept]}
    checks = [
        Check(name=name, verdict="passed", summary="", details=one)
        for name, one in (("accuracy", details), ("decisions", decisions))
    ]
    shown: Any = {"batches": (1, 16), "provenance": {}, "points": ()}
    return RunnerReport(runner=RunnerName("openvino", "int8"), checks=(*checks, *others), **shown)


def test_what_only_lacks_images_is_named_with_the_command(bundle: Bundle) -> None:
    failed = Check(name="batch invariance", verdict="failed", summary="", reasons=("rows change",))
    reports = {
        "openvino:int8-static": (2.2, int8_report(100, 1.0)),
        "onnxruntime:int8-static": (2.0, int8_report(100, 0.9)),
        "openvino:int8-dynamic": (1.5, int8_report(100, 1.0, failed)),
        "openvino+kernels:int8-static": (0.9, int8_report(100, 1.0)),
    }
    base, gate = RunnerName("onnxruntime"), Gate(accuracy=0.99)
    candidates = [Candidate(runner=base, passed=True, speed=Measured(value=1.0, low=1.0, high=1.0))]
    for name, (speed, report) in reports.items():
        judgement = judgement_of(report, gate)
        shares: Any = {"judged": judgement.judged, "kept": judgement.kept, "lacks_images": judgement.lacks_images}
        shares["speed"] = Measured(value=speed, low=speed - 0.1, high=speed + 0.1)
        candidates.append(Candidate(runner=RunnerName.parse(name), passed=False, **shares))
    images = JudgedImages(
        source="folder:my val", count=100, checked=100, sha256="ab", accuracy=0.6, copies=0, batches=(1, 16), answers={}
    )
    measured: Any = {"goal": "throughput", "batch": 16, "base": base, "gate": gate, "images": images}
    machine: Any = {"machine": Machine(cpu="a", cores=2), "versions": {}, "made_at": ""}
    choice = Choice(candidates=tuple(candidates), **measured, **machine)
    said = could_pass(choice, bundle.path)
    assert said.startswith(
        "with 500 images in place of 100, these could pass: openvino:int8-static, 2.20 times as fast as onnxruntime. "
        f"Add images to the data, and type gmmvit optimize {bundle.path} --data 'folder:my val' --gate 0.99 "
        "--for throughput --batch 16"
    )
    page = require_readable_page(page_of(choice, bundle)).text
    assert said in page
    assert "onnxruntime is the fastest, for throughput" in page


def test_decisions_are_kept_beside_an_accuracy() -> None:
    """A program that changes as many answers for the better as for the worse has PyTorch's accuracy."""
    report = int8_report(500, 0.9)
    assert judgement_of(report, Gate(accuracy=0.95)).why_not == ""
    judgement = judgement_of(report, Gate(accuracy=0.99))
    assert judgement.why_not == "kept decisions 0.9000, below the gate 0.97"
    assert (judgement.judged.value, judgement.kept.value) == (1.0, 0.9)


def test_mistakes_are_refused_before_any_work(bundle: Bundle) -> None:
    for words, message in (
        (("--data", "digits", "--gate", "1.5"), "--gate: expected a share below 1"),
        (("--data", "digits", "--gate", "0.9", "--keep-decisions", "0.9"), "two gates"),
        (("--data", "digits", "--for", "joy"), "--for: expected latency or throughput"),
        (("--data", "digits", "--batch", "9999"), "the largest batch of"),
    ):
        refused(gmmvit_here("optimize", bundle.path, *words), message)
