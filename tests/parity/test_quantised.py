"""Parity of a quantised graph: decisions on real images, and planted faults, each named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from click.testing import Result
from onnx import numpy_helper
from typer.testing import CliRunner

from gmmvit_cli.main import app
from gmmvit_deploy.bundle.artifacts import Bundle, open_bundle
from gmmvit_deploy.bundle.variants import open_variant
from gmmvit_deploy.errors import NotOfferedError
from gmmvit_deploy.exporting.variants import variant_from_bundle
from gmmvit_deploy.files.writing import sha256_of_file
from gmmvit_deploy.images.data.images import ArrayImages
from gmmvit_deploy.inference import openvino_kernels
from gmmvit_deploy.inference.cores import int8_saturates
from gmmvit_deploy.inference.precision import Form, Precision
from gmmvit_deploy.parity._calibration import check_calibration
from gmmvit_deploy.parity._preprocessing import PreprocessingCheck
from gmmvit_deploy.parity._quantised import QuantisedGraph
from gmmvit_deploy.parity._verdict import Check
from gmmvit_deploy.parity.check import check_parity
from gmmvit_deploy.parity.options import ParityOptions
from gmmvit_deploy.parity.reference import Reference
from gmmvit_deploy.parity.report import ParityReport
from gmmvit_deploy.runtimes.programs.emulated_precision import emulated_logits
from gmmvit_deploy.runtimes.runners.onnxruntime import OnnxRuntimeRunner
from gmmvit_deploy.runtimes.runners.open import open_runner
from gmmvit_deploy.runtimes.runners.runner import Runner
from gmmvit_deploy.tolerances import Limit, signal_to_noise_db
from tests.conftest import photo_pixels
from tests.parity.faults import Altered
from tests.planted.quantised import FAULTS, Constants, Fault
from tests.runtimes.kernels.test_masked_attention import needs_kernel

pytestmark = pytest.mark.integration
CPU = "graphs/int8-static.onnx"


def pixels() -> np.ndarray:
    return photo_pixels(6, 48)


def photographs() -> ArrayImages:
    return ArrayImages("photographs", pixels(), None)


def judged(bundle: Bundle, **options: Any) -> ParityReport:
    with closing(open_runner("onnxruntime", bundle, precision="int8")) as runner:
        return check_parity(bundle, [runner], ParityOptions(**options))


def planted(precise_bundle: Bundle, fault: Fault, tmp_path: Path, file: str = CPU) -> Bundle:
    """Copy the bundle, change a quantised graph, and record the changed graph as the right one."""
    shutil.copytree(precise_bundle.path, tmp_path / "bundle")
    path = tmp_path / "bundle" / file
    proto = onnx.load(path)
    constants = {tensor.name: numpy_helper.to_array(tensor).copy() for tensor in proto.graph.initializer}
    fault(constants, proto.graph)
    for tensor in proto.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(constants[tensor.name], tensor.name))
    onnx.save(proto, path)
    record = path.with_suffix(".json")
    data = json.loads(record.read_text())
    data["onnx_sha256"] = sha256_of_file(path)
    record.write_text(json.dumps(data))
    return open_bundle(tmp_path / "bundle")


def test_decisions_are_judged_on_real_images_only(precise_bundle: Bundle) -> None:
    without = judged(precise_bundle).runners[0]
    assert without.check("numeric").verdict == "passed"
    assert without.check("decisions").verdict == "skipped"
    assert "only real images show decisions; type --data folder:VAL" in without.check("decisions").summary
    images = judged(precise_bundle, data=photographs(), keep_decisions=0.5).runners[0]
    decisions = images.check("decisions")
    assert decisions.verdict == "passed", decisions.summary
    details = decisions.details
    assert details["inputs"] == 48
    assert details["interval"][0] < details["agreement"] <= details["interval"][1]
    stages = images.check("stages")
    assert stages.verdict == "passed", stages.reasons
    assert stages.details["db"] > 15
    assert 0.9 < stages.details["least_cosine"] < 1
    assert list(stages.details["stages"]) == ["quantisation", "runtime"]
    assert stages.details["stages"]["runtime"]["db"] > stages.details["db"]
    assert images.check("calibration").verdict == "passed", images.check("calibration").reasons
    strict = judged(precise_bundle, data=photographs(), keep_decisions=0.999).runners[0].check("decisions")
    assert strict.verdict in ("undecided", "failed")  # 48 images cannot show 99.9 %
    assert "of 48 images changed" in strict.reasons[0]


def test_the_gate_judges_all_images_where_the_other_checks_run_on_some(
    precise_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_float64: list[int] = []
    answers = Reference.answers

    def counted(self: Reference, inputs: Any, *, exact: bool) -> Any:
        if exact:
            in_float64.append(len(inputs))
        return answers(self, inputs, exact=exact)

    monkeypatch.setattr(Reference, "answers", counted)
    options = ParityOptions(data=photographs(), keep_decisions=0.5, numeric_images=24, batch=8)
    with ExitStack() as stack:
        runners = [
            stack.enter_context(closing(open_runner("onnxruntime", precise_bundle, precision=precision)))
            for precision in ("fp32", "int8")
        ]
        fp32, int8 = check_parity(precise_bundle, runners, options).runners
    assert in_float64[2:] == [8, 8, 8]  # after golden and random inputs
    assert [fp32.check("decisions").details["inputs"], int8.check("decisions").details["inputs"]] == [24, 48]
    assert int8.check("stages").details["images"] == 24
    assert (
        int8.check("decisions").details["agreement"]
        == (
            judged(precise_bundle, data=photographs(), keep_decisions=0.5)
            .runners[0]
            .check("decisions")
            .details["agreement"]
        )
    )


@pytest.mark.parametrize("wrong", [1, 8])
@pytest.mark.nightly
def test_single_images_and_batches_are_judged_and_the_worst_counts(precise_bundle: Bundle, wrong: int) -> None:
    """A program for a single image, as our chains of int8 products, may be wrong where that of a batch is right."""

    def turned(logits: np.ndarray) -> np.ndarray:
        return np.roll(logits, 1, axis=1) if len(logits) == wrong else logits

    variant = open_variant(precise_bundle, "int8", "static")
    with Altered(precise_bundle, turned, variant=variant) as runner:
        options = ParityOptions(data=photographs(), keep_decisions=0.9)
        report = check_parity(precise_bundle, [runner], options).runners[0]
    assert report.batches == (1, 8)  # the bundle takes no batch of 16
    for name in ("decisions", "stages"):
        check = report.check(name)
        assert (check.verdict, check.details["batch"]) == ("failed", wrong), check
        assert [one["batch"] for one in check.details["batches"] if one["verdict"] == "failed"] == [wrong]
        assert f"at batch {wrong}, the worst of 1 and 8" in check.summary
    assert all(f", batch {wrong}: " in why for why in report.check("numeric").reasons)


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("gates", "status", "said"),
    [
        ("--data --keep-decisions 0.5 --snr-db 15 --least-cosine 0.9", 0, "same answer"),
        ("--data --keep-decisions 0.99999", 1, "not decided: --keep-decisions: onnxruntime: too few images"),
        ("--data --snr-db 190", 1, "stages: quantisation: "),
        ("--data --least-cosine 0.9999999", 1, "stages: quantisation: least cosine"),
        ("--keep-decisions 0.5", 1, "not decided: --keep-decisions: onnxruntime: only real images show decisions"),
        ("--data --gate 0.99", 1, "not decided: --gate: onnxruntime: the data has no labels"),
    ],
)
def test_gates_decide_the_exit_status(
    gates: str, status: int, said: str, precise_bundle: Bundle, tmp_path: Path
) -> None:
    np.savez(tmp_path / "photographs.npz", images=pixels())
    words = gates.replace("--data", f"--data array:{tmp_path / 'photographs.npz'}").split()
    answer = CliRunner().invoke(app, ["parity", str(precise_bundle.path), "--runner", "onnxruntime:int8", *words])
    assert answer.exit_code == status, answer.output
    assert said in answer.output


def test_logits_that_are_not_finite_are_changed_decisions(precise_bundle: Bundle) -> None:
    with closing(open_runner("onnxruntime", precise_bundle, precision="int8")) as runner:
        runner._run = lambda inputs: np.full((len(inputs), 10), np.nan, np.float32)
        report = check_parity(precise_bundle, [runner], ParityOptions(data=photographs()))
    decisions = report.runners[0].check("decisions")
    assert decisions.verdict == "failed"
    assert "48 of 48 images changed, 48 of them to NaN" in decisions.reasons[0]


@pytest.mark.parametrize("what", FAULTS)
@pytest.mark.first(2)
def test_planted_faults_are_named_without_images(what: str, precise_bundle: Bundle, tmp_path: Path) -> None:
    fault, named = FAULTS[what]
    bundle = planted(precise_bundle, fault, tmp_path)
    check = check_calibration(bundle, QuantisedGraph(bundle, "int8", "static"), None)
    assert check.verdict == "failed"
    assert any(reason.startswith("quantisation: ") and named in reason for reason in check.reasons), check.reasons


@pytest.mark.nightly
@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_planted_faults_of_graphs_for_gpus_are_named(
    precision: Precision, precise_bundle: Bundle, tmp_path: Path
) -> None:
    def verdict(bundle: Bundle) -> Check:
        return check_calibration(bundle, QuantisedGraph(bundle, precision, ""), None)

    def rolled(constants: Constants, graph: onnx.GraphProto) -> None:
        name = next(node.input[0] for node in graph.node if node.op_type == "DequantizeLinear" and "axis" in str(node))
        constants[name] = np.roll(constants[name], 1, axis=0)

    assert verdict(precise_bundle).verdict == "passed"
    wrong = verdict(planted(precise_bundle, rolled, tmp_path, f"graphs/{precision}.onnx"))
    assert wrong.verdict == "failed"
    assert "blocks.0.attention.qkv" in wrong.reasons[0]


def test_other_nodes_of_another_version_are_undecided(precise_bundle: Bundle, tmp_path: Path) -> None:
    bundle = planted(precise_bundle, FAULTS["a norm is left out"][0], tmp_path)
    path = bundle.path / "graphs/int8-static.json"
    data = json.loads(path.read_text())
    data["versions"]["onnx"] = "1.0"
    path.write_text(json.dumps(data))
    check = check_calibration(bundle, QuantisedGraph(bundle, "int8", "static"), None)
    assert check.verdict == "undecided"
    assert "onnx 1.0" in check.reasons[0]
    assert f"gmmvit convert {bundle.path} --precision int8 --calibration IMAGES --force" in check.reasons[0]


def test_the_quantised_graph_is_blamed_and_not_the_runtime(precise_bundle: Bundle, tmp_path: Path) -> None:
    fault, named = FAULTS["a range cut to a third"]
    runner = judged(planted(precise_bundle, fault, tmp_path), data=photographs()).runners[0]
    assert any(named in reason for reason in runner.check("calibration").reasons)
    assert runner.check("stages").verdict == "passed"


def test_without_images_int8_is_not_judged(precise_bundle: Bundle, tmp_path: Path) -> None:
    def parity(bundle: Bundle, runner: str, *words: str) -> Result:
        return CliRunner().invoke(app, ["parity", str(bundle.path), "--runner", runner, *words])

    right = parity(precise_bundle, "onnxruntime,onnxruntime:int8")
    assert right.exit_code == 3, right.output
    first, *table = [line for line in right.stdout.splitlines() if line.strip()]
    assert first.startswith("undecided: onnxruntime:int8-static: stages: not judged on images: ")
    assert all(len(line) <= 100 for line in table)
    skipped = "skipped: onnxruntime: localize: not requested"
    assert skipped not in right.output
    assert skipped in parity(precise_bundle, "onnxruntime", "--verbose").output
    assert "type --data folder:VAL" in right.output
    assert right.output.splitlines()[-1].startswith("NOT JUDGED ON IMAGES")
    wrong = parity(planted(precise_bundle, FAULTS["the head is zero"][0], tmp_path), "onnxruntime:int8")
    assert wrong.exit_code == 1
    assert (
        "failed: onnxruntime:int8-static: calibration: quantisation: head/Gemm: its constant model.head.weight"
        in wrong.output
    )
    assert "failed: onnxruntime:int8-static: numeric: reference inputs, batch 1: logits differ by up to" in wrong.output
    assert "(int8's distance, recorded at conversion)" in wrong.output


def saturating(runner: Runner, bundle: Bundle) -> Callable[[np.ndarray], np.ndarray]:
    right = runner._run

    def run(inputs: np.ndarray) -> np.ndarray:
        logits = right(inputs)
        return np.clip(logits, -0.3 * np.abs(logits).max(), 0.3 * np.abs(logits).max())

    return run


def float32(runner: Runner, bundle: Bundle) -> Callable[[np.ndarray], np.ndarray]:
    return OnnxRuntimeRunner(bundle)._run


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("fault", "named"),
    [(saturating, "from the quantised graph's logits"), (float32, "another graph, such as the float32 graph")],
)
def test_a_wrong_runtime_is_named(
    fault: Callable[[Runner, Bundle], Callable[[np.ndarray], np.ndarray]], named: str, precise_bundle: Bundle
) -> None:
    """The graph is right, so the runtime is named, and not the calibration."""
    with closing(open_runner("onnxruntime", precise_bundle, precision="int8")) as runner:
        runner._run = fault(runner, precise_bundle)
        report = check_parity(precise_bundle, [runner], ParityOptions(data=photographs()))
    checks = report.runners[0]
    assert named in checks.check("numeric").reasons[0]
    assert [why.partition(":")[0] for why in checks.check("stages").reasons] == ["runtime"]
    assert checks.check("calibration").verdict == "passed"


@needs_kernel
@pytest.mark.skipif(bool(int8_saturates()), reason="OpenVINO's own products saturate on this CPU")
def test_a_kernel_that_saturates_is_named(precise_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare: Callable[..., Any] = openvino_kernels.prepared_mask

    def saturated(mask: np.ndarray, arithmetic: Any) -> Any:
        return prepare(np.clip(mask, -np.abs(mask).max() / 3, np.abs(mask).max() / 3), arithmetic)

    for fault in (False, True):
        if fault:
            monkeypatch.setattr(openvino_kernels, "prepared_mask", saturated)
        with closing(open_runner("openvino+kernels", precise_bundle, precision="int8")) as runner:
            report = check_parity(precise_bundle, [runner], ParityOptions(data=photographs()))
        stages = report.runners[0].check("stages")
        assert list(stages.details["stages"]) == ["quantisation", "runtime", "kernels"]
        assert [why.partition(":")[0] for why in stages.reasons] == ["kernels"] * fault, stages
        assert report.runners[0].check("calibration").verdict == "passed"


def test_a_server_in_int8_is_compared_with_the_quantised_graph(precise_bundle: Bundle) -> None:
    """The server is right, and quantisation must not be taken for wrong preprocessing."""
    bundle = precise_bundle
    golden, graph = bundle.golden_set(), QuantisedGraph(bundle, "int8", "static")
    images = {b"photograph": pixels()[0], **dict(zip(golden.images, golden.image_pixels, strict=True))}
    offered = iter([NotOfferedError("no preprocessing model here")])

    def model(name: str) -> Any:
        for refused in offered:
            raise refused
        return SimpleNamespace(max_batch=8)

    def infer(batch: np.ndarray) -> np.ndarray:
        return graph.logits(bundle.inputs_from_pixels(np.stack([images[bytes(image)] for image in batch[:, 0]])))

    with closing(open_runner("onnxruntime", bundle, precision="int8")) as runner:
        connection = SimpleNamespace(model=model)
        runner.server = SimpleNamespace(connection=connection, infer=infer, preprocess="preprocess", ensemble="model")
        reference = Reference(bundle)
        exact = reference.logits(bundle.inputs_from_pixels(pixels()[:1]))[1][0]
        data = SimpleNamespace(
            pixels=lambda index, spec: pixels()[index], where=lambda index: "a.png", encoded=lambda index: b"photograph"
        )
        limit = Limit(largest=1e-3, rms=None, derivation="")
        tested: Any = SimpleNamespace(
            runner=runner,
            run=SimpleNamespace(stream=SimpleNamespace(images=data, taken=[0]), reference=reference),
            graph=graph,
            check=lambda kind: SimpleNamespace(widest_limit=limit),
        )
        check = PreprocessingCheck(tested).judge()
    assert np.abs(infer(np.array([[b"photograph"]], dtype=object))[0] - exact).max() > limit.largest
    assert check.verdict == "undecided", check.reasons
    assert "gives the quantised graph's logits for 1 images of the data" in check.summary


@pytest.mark.parametrize("form", ["", "static"])
@pytest.mark.nightly
def test_the_recorded_db_is_that_of_the_graph_that_ships(
    form: Form, precise_bundle: Bundle, calibration_images: Path
) -> None:
    variant = open_variant(precise_bundle, "int8", form)
    with np.load(calibration_images) as arrays:
        judged = precise_bundle.inputs_from_pixels(arrays["images"][3::4])
    quantised, plain = (
        emulated_logits(ir.load(path), judged, name="x") for path in (variant.path, precise_bundle.onnx_path)
    )
    assert variant.record.calibration["recipe"]["db"] == pytest.approx(signal_to_noise_db(quantised, plain), abs=0.02)


def test_the_best_recipe_is_kept_and_the_graph_for_gpus_has_it_too(precise_bundle: Bundle) -> None:
    of_gpus, calibration = (
        json.loads((precise_bundle.path / f"graphs/{name}.json").read_text())["calibration"]
        for name in ("int8", "int8-static")
    )
    best, tried = calibration["recipe"], calibration["tried"]
    assert best in tried
    assert best["db"] == max(recipe["db"] for recipe in tried) > calibration["screened"][0]["db"] + 1
    assert calibration["judged_images"] == calibration["images"] // 4
    for part in ("rounding", "smoothing", "ranges"):
        assert of_gpus["recipe"][part] == best[part]


@needs_kernel
def test_kernels_are_judged_beside_the_same_form_of_int8(precise_bundle: Bundle, tmp_path: Path) -> None:
    shutil.copytree(precise_bundle.path, tmp_path / "bundle")
    bundle = open_bundle(tmp_path / "bundle")
    variant_from_bundle(bundle, "int8")  # the dynamic form, beside the static form
    with closing(open_runner("openvino+kernels:int8-dynamic", bundle)) as runner:
        options = ParityOptions(data=photographs(), keep_decisions=0.5)
        stages = check_parity(bundle, [runner], options).runners[0].check("stages").details["stages"]
    # The static graph in place of the dynamic one would differ by as much as quantisation.
    assert all(stages[stage]["db"] > stages["quantisation"]["db"] + 5 for stage in ("runtime", "kernels"))
