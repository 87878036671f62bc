"""A benchmark states what it measured, and whether its result is valid."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gmmvit_deploy.bench import _products, served_load
from gmmvit_deploy.bench.cells import Plan, measure, ratios
from gmmvit_deploy.bench.compare import compare, open_result
from gmmvit_deploy.bench.machine import machine_state
from gmmvit_deploy.bench.outputs import Expected
from gmmvit_deploy.bench.page import page_of, write_page
from gmmvit_deploy.bench.report import BenchReport, machine_reasons, reasons_against
from gmmvit_deploy.bench.roofline import measured_roofline, network_work
from gmmvit_deploy.bench.run import BenchOptions, bench
from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.exporting.golden import fresh_inputs
from gmmvit_deploy.images.data.images import ArrayImages
from gmmvit_deploy.inference.cores import cores
from gmmvit_deploy.inference.onnxruntime_program import ROWS_A_CORE
from gmmvit_deploy.models.families.counting import multiply_accumulates
from gmmvit_deploy.runtimes.runners.onnxruntime import OnnxRuntimeRunner
from gmmvit_deploy.runtimes.runners.open import open_runners
from tests.browser import accessibility_problems
from tests.pages import require_readable_page
from tests.serving.shared import Running
from tests.waiting import best_of

QUICK = Plan(batches=(1, 4), rounds=3, seconds=0.1)


class Slower(OnnxRuntimeRunner):
    """A runner with a fault that the report must show.  delay_s: added to every batch; off: added to every logit."""

    name = "onnxruntime"
    delay_s = 0.01
    off = 0.0

    def _run(self, batch: NDArray[Any]) -> NDArray[Any]:
        time.sleep(self.delay_s)
        return super()._run(batch) + np.float32(self.off)


@pytest.fixture(scope="module")
def report(bundle: Bundle) -> Iterator[BenchReport]:
    with pytest.MonkeyPatch.context() as patch, open_runners(["onnxruntime", "openvino"], bundle) as runners:
        patch.setattr(served_load, "_MIN_SECONDS", 0.0)  # as many queries as a p99 needs, and no more
        patch.setattr(served_load, "_STEPS", 2)
        patch.setattr(_products, "_SECONDS_A_PRODUCT", 0.0)
        yield bench(bundle, runners, BenchOptions(plan=QUICK, samples=16, bound_ms=50))


@pytest.mark.nightly
def test_every_runner_at_every_batch(report: BenchReport) -> None:
    cells = {(cell.runner, cell.scenario, cell.batch) for cell in report.cells}
    scenarios = [("SingleStream", 1), ("MultiStream", 4), ("Offline", 4)]
    assert cells == {(runner, *scenario) for runner in ("onnxruntime", "openvino") for scenario in scenarios}
    for cell in report.cells:
        assert cell.outputs.right
        assert cell.outputs.answers == sum(cell.samples)
        assert len(cell.rounds) == 3
        assert cell.scenario == "Offline" or cell.queries >= 64
    assert not report.wrong
    assert report.runners["onnxruntime"]["threads"] == report.runners["openvino"]["threads"] == str(cores())
    assert report.runners["openvino"]["hint"] == "f32"
    assert report.runners["onnxruntime"]["rows at once on a core"] == str(ROWS_A_CORE)


@pytest.mark.alone
def test_a_slower_runner_shows_as_slower(bundle: Bundle) -> None:
    inputs, plan = fresh_inputs(bundle, 8), replace(QUICK, batches=(1,))

    def quick_over_slow() -> float:
        with OnnxRuntimeRunner(bundle) as quick, Slower(bundle) as slow:
            slow.precision = "fp32"
            measured = measure([quick, slow], inputs, Expected(bundle, inputs), plan)
        cells = [cell for cell in measured if cell.scenario == "SingleStream"]
        assert cells[1].median_ms > 10
        ((cell, first, relative),) = ratios(cells)
        assert (cell, first) == (cells[1], cells[0])
        return max(1 / relative.low, cells[0].median_ms / 10)

    assert best_of(3, quick_over_slow, enough=1) < 1


@pytest.mark.nightly
@pytest.mark.parametrize(("off", "largest"), [(0.01, pytest.approx(0.01, rel=0.1)), (float("nan"), None)])
def test_wrong_answers_make_a_run_invalid(
    off: float, largest: Any, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_load, "_STEPS", 1)
    monkeypatch.setattr(served_load, "_MIN_SECONDS", 0.0)
    with Slower(bundle) as wrong:
        wrong.delay_s, wrong.off = 0.0, off
        options = BenchOptions(plan=QUICK, samples=8, bound_ms=50, roofline=False)
        bench_report = bench(bundle, [wrong], options)
    assert bench_report.verdict == "INVALID"
    assert len(bench_report.wrong) == 4  # three cells and the arrivals
    assert all("answers were wrong: a logit is" in reason for reason in bench_report.wrong)
    result = json.loads(json.dumps(bench_report.to_json(), allow_nan=False))
    assert [each["outputs"]["largest"] for each in (*result["cells"], *result["loads"])] == [largest] * 4


def test_every_reason_not_to_believe_a_run(report: BenchReport) -> None:
    calm = replace(report.before, others=0.0, stolen=0.0, spin_ms=1.0)
    cells = copy.deepcopy(report.cells)
    for cell in cells:
        cell.rounds = [np.full_like(part, 2.0) for part in cell.rounds]
        cell.seconds = [count * 1e-3 for count in cell.samples]
    assert reasons_against(cells, (), calm, calm) == []
    assert "other programs took 30%" in reasons_against(cells, (), replace(calm, others=0.3), calm)[0]
    assert "the hypervisor took 20%" in reasons_against(cells, (), calm, replace(calm, stolen=0.2))[0]
    assert "changed by +50%" in reasons_against(cells, (), calm, replace(calm, spin_ms=1.5))[0]
    cells[0].rounds = [np.full(30, value) for value in (1.0, 2.0, 3.0)]
    assert "unstable: the spread of the rounds is 50%" in reasons_against(cells, (), calm, calm)[0]
    cells[0].rounds = [np.ones(5)] * 3
    assert "too few queries: expected at least 64 for a p90, got 15" in reasons_against(cells, (), calm, calm)[0]
    cells[0].rounds = [np.ones(50)] * 3
    cells[0].complaints = ["something: odd"]
    assert reasons_against(cells, (), calm, calm) == ["onnxruntime, SingleStream: LoadGen: something: odd"]


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["vit_gmm", "swin_gmm", "cait_gmm", "pit_gmm", "t2t_gmm"])
def test_operations_are_those_that_the_model_counts(name: str, tensor_bundles: dict[str, Bundle]) -> None:
    bundle = tensor_bundles[name]
    counted = multiply_accumulates(bundle.manifest.spec)
    for batch in (1, 4):
        work = network_work(bundle, batch)
        # Folding drops unused computations, and unfolding as a convolution multiplies by ones and zeros.
        assert work.operations / 2 / batch == pytest.approx(counted, rel=0.15)
        assert sum(work.products.values()) > 4


@pytest.mark.nightly
def test_roofline_is_the_best_of_what_was_measured(bundle: Bundle) -> None:
    works = [network_work(bundle, batch) for batch in (1, 4)]
    line = measured_roofline(works, "fp32")
    assert set(_products.libraries("fp32", "cpu")) == {"torch", "onnxruntime", "openvino"}
    assert line.best.shape in {shape for work in works for shape in work.products}
    assert line.min_ms(works[1]) == pytest.approx(
        1e3 * max(works[1].operations / line.best.gflops / 1e9, works[1].min_bytes("fp32") / line.bandwidth)
    )
    assert measured_roofline(works[:1], "fp32", seen=line).best.gflops >= line.best.gflops
    assert measured_roofline(works, "fp8") is None


@pytest.mark.nightly
def test_a_gpu_is_part_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: BenchReport) -> None:
    """A stand-in for nvidia-smi prints the state of two GPUs; another program uses the second."""
    stub = tmp_path / "nvidia-smi"
    stub.write_text("#!/bin/sh\necho '1980, 3, 41'\necho '1410, 62, 66'\n")
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    state = machine_state()
    assert [(gpu.megahertz, gpu.used, gpu.celsius) for gpu in state.gpus] == [(1980, 0.03, 41), (1410, 0.62, 66)]
    calm = replace(report.before, others=0.0, stolen=0.0)
    busy = replace(calm, gpus=state.gpus)
    assert machine_reasons(calm, calm) == []
    assert machine_reasons(calm, busy) == [
        "machine busy: other programs used 62% of a GPU after the run, expected at most 10%"
    ]
    shown = json.loads(json.dumps(report.to_json()))
    shown["after"] = asdict(busy)
    assert "GPU 1410 MHz, 62%, 66 °C" in page_of(shown)
    stub.write_text("#!/bin/sh\necho '[N/A], [N/A], [N/A]'\n")
    assert machine_state().gpus == ()


@pytest.mark.alone
@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "int8"])
def test_a_gpu_is_held_to_its_own_rates(bundle: Bundle, precision: str) -> None:
    works = [network_work(bundle, 64)]

    def cpu_over_gpu() -> float:
        here, there = measured_roofline(works, "fp32"), measured_roofline(works, precision, "gpu")
        return here.best.gflops / there.best.gflops

    assert best_of(3, cpu_over_gpu, enough=1) < 1


def test_shares_of_the_roofline(report: BenchReport) -> None:
    shares = report.shares()
    assert {(share.runner, share.batch) for share in shares} == {
        (runner, batch) for runner in ("onnxruntime", "openvino") for batch in (1, 4)
    }
    assert all(share.share > 0 for share in shares)
    slower = tuple(replace(line, best=replace(line.best, gflops=1e-3)) for line in report.rooflines)
    reasons = replace(report, rooflines=slower).reasons
    assert any(
        "onnxruntime, batch 4: " in reason and "the machine was slower while the roofline was measured" in reason
        for reason in reasons
    )


@pytest.mark.alone
def test_no_runner_is_much_faster_than_the_roofline(bundle: Bundle) -> None:
    """20% is the error of a measurement of a tenth of a second."""

    def largest_share() -> float:
        with open_runners(["onnxruntime", "openvino"], bundle) as runners:
            measured = bench(bundle, runners, BenchOptions(plan=QUICK, samples=16))
        return max(share.share for share in measured.shares())

    assert best_of(3, largest_share, enough=1.2) < 1.2


@pytest.mark.nightly
@pytest.mark.integration
def test_the_page_holds_everything_and_fetches_nothing(report: BenchReport, tmp_path: Path) -> None:
    path = tmp_path / "bench.html"
    write_page(report.to_json(), path)
    text = path.read_text()
    for words in ("Throughput against batch", "Latency against load", "Where the time goes", "Run card"):
        assert words in text
    assert text.count("<svg") == 6
    for fetched in ("<script", "<link", "src=", "@import", "url("):
        assert fetched not in text.replace("url(#", "")
    assert report.bundle["sha256"] in text
    assert text == page_of(json.loads(json.dumps(report.to_json())))
    tree = require_readable_page(text)
    assert tree.all("h2")[0].text == f"Verdict: {'✓' if report.verdict == 'VALID' else '✗'} {report.verdict}"
    shown = [line.text for line in tree.all("main")[0].children[1].all("li")]
    assert set(report.reasons) <= set(shown)
    assert accessibility_problems(path) == []


@pytest.fixture
def result(report: BenchReport) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(json.dumps(report.to_json(), allow_nan=False))
    return result | {"verdict": "VALID", "reasons": []}


def test_compared_results_list_what_became_slower(result: dict[str, Any]) -> None:
    other = copy.deepcopy(result)
    for cell in other["cells"]:
        if cell["runner"] == "openvino":
            cell["median_ms"] *= 100
            cell["round_ms"] = [100 * value for value in cell["round_ms"]]
    other["versions"]["openvino"] = "2030.1"
    other["runners"]["openvino"]["threads"] = "7"
    rows, differing = compare(result, other)
    slower = [row for row in rows if row.certain]
    assert {row.runner for row in slower} == {"openvino"}
    assert all(row.change.value == pytest.approx(100) for row in slower)
    assert differing["versions openvino"][1] == "2030.1"
    assert differing["runner openvino threads"] == (result["runners"]["openvino"]["threads"], "7")


def test_results_that_cannot_be_compared(result: dict[str, Any], tmp_path: Path) -> None:
    for part, key, value, message in (
        ("machine", "cpu", "another", "the processor"),
        ("data", "sha256", "0", "the data"),
        ("bundle", "model", "swin", "the model"),
    ):
        with pytest.raises(InputError, match=message):
            compare(result, result | {part: result[part] | {key: value}})
    with pytest.raises(InputError, match="B is INVALID: machine busy"):
        compare(result, result | {"verdict": "INVALID", "reasons": ["machine busy"]})
    with pytest.raises(InputError, match="no runner was measured in both"):
        compare(result, result | {"cells": [cell | {"batch": 128} for cell in result["cells"]]})
    file = tmp_path / "a.json"
    for text, message in (
        (None, "cannot be read"),
        ("{", "not JSON"),
        ('{"format": "gmmvit-parity/1"}', "expected format gmmvit-bench/1, got 'gmmvit-parity/1'"),
    ):
        if text is not None:
            file.write_text(text)
        with pytest.raises(InputError, match=message):
            open_result(file)


@pytest.mark.parametrize(
    ("plan", "changes", "message"),
    [
        (replace(QUICK, batches=(0,)), {}, "at least 1"),
        (replace(QUICK, batches=(4, 4)), {}, "distinct"),
        (replace(QUICK, rounds=2), {}, "at least 3"),
        (replace(QUICK, seconds=0), {}, "seconds is 0"),
        (QUICK, {"samples": 3}, "at least the largest batch, 4"),
        (QUICK, {"bound_ms": -1.0}, "more than 0"),
    ],
)
def test_options_that_make_no_sense(plan: Plan, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        BenchOptions(plan=plan, **{"samples": 16, **changes})


def test_runners_and_data_that_do_not_fit(bundle: Bundle) -> None:
    with pytest.raises(InputError, match="no runner was named"):
        bench(bundle, [])
    with OnnxRuntimeRunner(bundle) as runner:
        huge = Plan(batches=(10_000,), rounds=3, seconds=0.1)
        with pytest.raises(InputError, match="cannot take any of the batches 10000"):
            bench(bundle, [runner], BenchOptions(plan=huge, samples=10_000))
        few = ArrayImages("few", np.eye(3, 32, dtype=np.uint8)[[0, 1, 1]].repeat(96).reshape(3, 32, 32, 3), None)
        with pytest.raises(InputError, match="few has 2 distinct images"):
            bench(bundle, [runner], BenchOptions(plan=QUICK, samples=8, data=few))


@pytest.mark.integration
def test_bench_of_a_live_server_from_the_command_line(
    bundle: Bundle, server: Running, gmmvit: Any, tmp_path: Path
) -> None:
    out, page = tmp_path / "result.json", tmp_path / "page.html"
    urls = ["--url", server.grpc_url, "--url", server.http_url]
    names = "onnxruntime,triton-grpc,triton-http"
    quick = ["--batch", "1,4", "--rounds", "3", "--seconds", "0.3", "--samples", "16", "--no-roofline", "--synthetic"]
    answer = gmmvit("bench", bundle.path, "--runner", names, *urls, *quick, "--output", out, "--report", page)
    assert answer.returncode == 0, answer.stderr
    assert "single image: triton-grpc + decoding" in answer.stdout
    result = open_result(out)
    steps = {step["name"]: step for step in result["waterfall"]}
    assert list(steps) == ["onnxruntime", "triton-grpc", "triton-http", "triton-grpc + decoding"]
    parts = steps["triton-grpc"]["parts"]
    assert set(parts) == {f"gmmvit_network {part}" for part in ("queue", "input", "infer", "output")} | {"unexplained"}
    assert parts["gmmvit_network infer"] > 0
    assert parts["unexplained"] > 0
    assert any(name.startswith("gmmvit_preprocess ") for name in steps["triton-grpc + decoding"]["parts"])
    assert all(cell["outputs"]["right"] for cell in result["cells"])
    stated = {"backend": "python", "threads": "0", "instances": "1", "queue delay": "0 µs"}
    for name in ("triton-grpc", "triton-http"):
        assert stated.items() <= result["runners"][name].items()
    assert page.read_text().startswith("<!doctype html>")
    assert result["data"]["name"].startswith("synthetic")
    assert "skipped: roofline: not requested" in answer.stdout
    for arguments, message in (
        ((), "expected a bundle, or --compare"),
        ((bundle.path,), "expected images with --data, or --synthetic"),
        ((bundle.path, "--data", "digits", "--synthetic"), "expected images with --data, or --synthetic"),
        ((bundle.path, "--synthetic", "--batch", "one"), "expected numbers separated by commas, got 'one'"),
        ((bundle.path, "--compare", out, out), "compares two result files and measures no bundle"),
    ):
        refused = gmmvit("bench", *arguments)
        assert refused.returncode == 1
        assert message in refused.stderr
