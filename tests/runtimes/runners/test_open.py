"""Every runner states what it runs, the best that passed is taken, and PyTorch's outputs come before any answer."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gmmvit_deploy.bench.cells import Plan
from gmmvit_deploy.bench.run import BenchOptions, bench
from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.bundle.choices import CHOICES_FILE, Machine, read_choices
from gmmvit_deploy.bundle.variants import open_variant
from gmmvit_deploy.errors import InputError, RunnerUnavailableError
from gmmvit_deploy.exporting.fastest import record_fastest
from gmmvit_deploy.exporting.golden import fresh_inputs
from gmmvit_deploy.files.writing import sha256_of_file
from gmmvit_deploy.parity.check import check_parity
from gmmvit_deploy.runtimes.programs import openvino as openvino_settings
from gmmvit_deploy.runtimes.programs import openvino as runtime_module
from gmmvit_deploy.runtimes.programs.openvino import has_bf16, why_no_openvino
from gmmvit_deploy.runtimes.runners._openvino import OpenVinoRunner
from gmmvit_deploy.runtimes.runners.chosen import choose_runner, this_machine
from gmmvit_deploy.runtimes.runners.classify import BundleClassifier
from gmmvit_deploy.runtimes.runners.inspection import LOGITS
from gmmvit_deploy.runtimes.runners.open import default_runners, fastest_runner, open_runner
from gmmvit_deploy.runtimes.runners.runner import Runner
from gmmvit_deploy.runtimes.runners.speed import measured_speed, speed_in_words
from tests.choices import chosen_bundle
from tests.runtimes.kernels.test_masked_attention import needs_kernel


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_the_plain_runner_runs_the_file_as_it_lies_on_disk(name: str, bundle: Bundle) -> None:
    with open_runner(name, bundle) as runner:
        assert (runner.name, runner.label, runner.callers, runner.server) == (name, name, 1, None)
        assert "our own" not in runner.settings.get("attention", "")
        provenance = runner.provenance()
    assert provenance["graph"] == "model.onnx"
    assert provenance["graph SHA-256"] == sha256_of_file(bundle.onnx_path)
    assert "made from" not in provenance


@needs_kernel
def test_kernels_have_a_graph_with_a_hash_of_its_own(bundle: Bundle, precise_bundle: Bundle) -> None:
    hashes = []
    for opened in (bundle, precise_bundle):  # the same graph, opened twice
        with open_runner("openvino+kernels", opened) as runner:
            assert runner.settings["attention"] == "our own, f32"
            provenance = runner.provenance()
        assert provenance["graph"] == "model.onnx with our kernels"
        assert provenance["made from"] == "model.onnx"
        assert provenance["made from SHA-256"] == sha256_of_file(bundle.onnx_path)
        assert len(provenance["kernels SHA-256"]) == 64
        hashes.append(provenance["graph SHA-256"])
    assert hashes[0] == hashes[1] != sha256_of_file(bundle.onnx_path)


@needs_kernel
@pytest.mark.parametrize("name", ["onnxruntime", "openvino", "openvino+kernels"])
def test_inner_values_are_those_of_the_graph_that_runs(name: str, bundle: Bundle) -> None:
    inputs = fresh_inputs(bundle, 5)
    with open_runner(name, bundle) as runner:
        graph, why_not = runner.inspectable()
        assert graph is not None
        assert why_not == ""
        last = [node.outputs[0].name for node in graph.model.graph if node.name.startswith("blocks.0/")][-1]
        values = graph.values(inputs, [last])
        np.testing.assert_allclose(values[LOGITS], runner.run(inputs), atol=1e-5)
        assert values[last].shape[0] == 5
        assert graph.values(inputs, []).keys() == {LOGITS}
    assert ("with our kernels" in graph.name) == name.endswith("+kernels")


def test_a_module_has_no_graph(bundle: Bundle) -> None:
    with open_runner("eager", bundle) as runner:
        assert runner.inspectable() == (None, "eager runs the trained module, not the bundle's graph")
        assert runner.provenance()["weights SHA-256"] == sha256_of_file(bundle.weights_path)
        assert runner.graph is None


def test_kernels_that_cannot_be_compiled_are_skipped_with_the_reason(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_module, "openvino_library", lambda: (None, "no C++ compiler"))
    assert default_runners(bundle) == (["onnxruntime", "openvino"], ["openvino+kernels: no C++ compiler"])
    with pytest.raises(InputError, match=r"openvino\+kernels cannot run here: no C\+\+ compiler"):
        open_runner("openvino+kernels", bundle)


def test_the_fastest_runner_is_openvino_where_it_can_run(
    bundle: Bundle, precise_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fastest_runner(precise_bundle, "fp16")[0] == "onnxruntime"
    monkeypatch.setattr(runtime_module, "find_spec", lambda name: None)
    name, why = fastest_runner(bundle)
    assert name == "onnxruntime"
    assert "pip install 'gmmvit-deploy[openvino]'" in why


# ---- the runner that is taken for a bundle on this machine -----------------------------------------------------------


def test_the_best_that_passed_is_taken(precise_bundle: Bundle, tmp_path: Path) -> None:
    """In place of the usual runner; ``--runner`` wins."""
    bundle = chosen_bundle(precise_bundle, tmp_path / "b", "onnxruntime:fp16", "openvino")
    chosen = choose_runner(bundle)
    assert (str(chosen.runner), chosen.notes) == ("onnxruntime:fp16", ())
    with BundleClassifier(bundle) as classifier:
        assert (classifier.runner, classifier.bundle) == ("onnxruntime:fp16", bundle.sha256)
    with BundleClassifier(bundle, runner="openvino") as classifier:
        assert classifier.runner == "openvino"


def test_a_machine_that_lacks_the_best_takes_the_next_and_says_so(
    precise_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = chosen_bundle(precise_bundle, tmp_path / "b", "openvino:bf16", "onnxruntime:fp16")
    monkeypatch.setattr(openvino_settings, "find_spec", lambda name: None)
    chosen = choose_runner(bundle)
    assert str(chosen.runner) == "onnxruntime:fp16"
    (note,) = chosen.notes
    assert "openvino:bf16 is not used" in note
    assert "pip install 'gmmvit-deploy[openvino]'" in note


def test_a_graph_that_was_written_again_is_not_taken(precise_bundle: Bundle, tmp_path: Path) -> None:
    bundle = chosen_bundle(precise_bundle, tmp_path / "b", "onnxruntime:fp16", graph_sha256="0" * 64)
    chosen = choose_runner(bundle)
    assert str(chosen.runner) == fastest_runner(bundle)[0]
    assert any("fp16.onnx is not the graph that was judged" in note for note in chosen.notes)


def test_neither_another_machine_nor_a_damaged_file_decides(precise_bundle: Bundle, tmp_path: Path) -> None:
    machine = Machine(cpu="another", cores=this_machine().cores)
    bundle = chosen_bundle(precise_bundle, tmp_path / "b", "onnxruntime:fp16", machine=machine)
    usual = fastest_runner(bundle)[0]
    chosen = choose_runner(bundle)
    assert (str(chosen.runner), chosen.measured) == (usual, False)
    assert f"has no choice for this kind of machine, {this_machine()}, only for {machine}" in chosen.notes[0]
    (bundle.path / CHOICES_FILE).write_text("{")
    chosen = choose_runner(bundle)
    assert str(chosen.runner) == usual
    assert f"{CHOICES_FILE} is not used" in chosen.notes[0]


def test_export_records_the_float32_programs_that_it_proved(bundle: Bundle, tmp_path: Path) -> None:
    copied = chosen_bundle(bundle, tmp_path / "b")
    choice = record_fastest(copied)
    assert choice is not None
    assert read_choices(copied.path) == ((choice,), "")
    proven = {name for name in ("onnxruntime", "openvino", "openvino+kernels") if _proven(copied, name)}
    assert {str(candidate.runner) for candidate in choice.passed} == proven
    assert choose_runner(copied).runner == choice.passed[0].runner


def _proven(bundle: Bundle, name: str) -> bool:
    return f"{name}_largest_abs" in bundle.manifest.export_parity


# ---- PyTorch's reference outputs, once before the first answer -------------------------------------------------------


needs_bf16 = pytest.mark.skipif(not has_bf16(), reason="this CPU has no bf16")


def fault(alone: bool) -> Callable[[Any, Any], Any]:
    """A fault of an image alone, or of a batch."""
    run = OpenVinoRunner._run
    return lambda self, batch: run(self, batch) + (1 if (len(batch) == 1) == alone else 0)


@pytest.mark.first(1)
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=needs_bf16), "int8"])
def test_a_wrong_program_gives_no_answer(precision: str, precise_bundle: Bundle, monkeypatch: Any) -> None:
    inputs, logits = precise_bundle.golden()
    for alone in (True, False):
        wrong, right = (inputs[:1], inputs[:2]) if alone else (inputs[:2], inputs[:1])
        monkeypatch.setattr(OpenVinoRunner, "_run", fault(alone))
        with open_runner("openvino", precise_bundle, precision=precision) as runner:  # type: ignore[arg-type]
            np.testing.assert_allclose(runner.run(right), logits[: len(right)], atol=1)
            with pytest.raises(
                RunnerUnavailableError, match=r"the logits differ from PyTorch's by 1.*at most"
            ) as error:
                runner.run(wrong)
        label = runner.label
        assert f"runner {label} is wrong on this machine" in str(error.value)
        assert "type --runner with another runner, such as onnxruntime" in error.value.hint
        assert f"--runner {label}" in error.value.hint
        monkeypatch.undo()


@pytest.mark.nightly
def test_parity_and_bench_judge_a_wrong_program_that_gives_no_answer_after_them(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OpenVinoRunner, "_run", fault(alone=False))
    plan = Plan(batches=(2,), rounds=3, seconds=0.01)
    for judge in (
        lambda runner: check_parity(bundle, [runner]).verdict == "failed",
        lambda runner: bool(bench(bundle, [runner], BenchOptions(plan=plan, roofline=False)).wrong),
    ):
        with open_runner("openvino", bundle) as runner:
            assert judge(runner)
            with pytest.raises(RunnerUnavailableError, match="is wrong on this machine"):
                runner.run(bundle.golden()[0][:2])


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_a_forked_process_does_not_wait_for_threads_it_does_not_have(name: str, bundle: Bundle) -> None:
    batch = bundle.golden()[0]
    with open_runner(name, bundle) as runner:
        expected = runner.run(batch)
        reading, writing = os.pipe()
        if not (child := os.fork()):
            os.write(writing, _in_child(runner, name, batch, expected).encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as said:
            assert said.read() == "refused; own runner right"
        os.waitpid(child, 0)


def _in_child(runner: Runner, name: str, batch: Any, expected: Any) -> str:
    try:
        runner.run(batch)
        words = "answered"
    except InputError as exc:
        words = "refused" if "is a fork" in str(exc) and "open a runner in each" in exc.hint else str(exc)
    with open_runner(name, runner.bundle) as own:
        right = np.allclose(own.run(batch), expected, atol=1e-5)
    return f"{words}; own runner {'right' if right else 'wrong'}"


# ---- the speed of a precision on this CPU ----------------------------------------------------------------------------


@pytest.mark.first(1)
@pytest.mark.parametrize(("precision", "onnxruntime"), [("int8", True), ("fp8", False)])
def test_every_runtime_that_serves_the_precision_is_timed(
    precision: str, onnxruntime: bool, precise_bundle: Bundle
) -> None:
    variant = open_variant(precise_bundle, precision, "static" if precision == "int8" else "")  # type: ignore[arg-type]
    speed = measured_speed(precise_bundle, variant)
    openvino = not why_no_openvino(variant.precision)
    expected = ["openvino"] * openvino + ["onnxruntime"] * onnxruntime
    assert [runner.removesuffix("+kernels") for runner in speed["times_as_fast"]] == expected
    for ratios in speed["times_as_fast"].values():
        assert [*ratios] == ["1", "8"]  # the largest batch of this bundle
        assert all(0 < low <= ratio <= high for ratio, low, high in ratios.values())


@pytest.mark.parametrize(
    ("ends", "advice"),
    [
        ((1.85, 1.7, 1.9), ""),
        ((0.75, 0.7, 0.9), ": slower, so do not use it here"),
        ((0.95, 0.8, 1.1), ": no clear difference"),
    ],
)
def test_a_slower_precision_is_named_so(ends: tuple[float, float, float], advice: str) -> None:
    ratio, low, high = ends
    words = f"batch 16: {ratio:.2f} ({low:.2f} to {high:.2f}) times as fast as float32{advice}"
    assert speed_in_words({"16": ends}) == words
