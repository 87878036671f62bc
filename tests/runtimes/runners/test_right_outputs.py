"""Whatever program can be named gives PyTorch's reference outputs once before its first answer."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gmmvit_deploy.bench.cells import Plan
from gmmvit_deploy.bench.run import BenchOptions, bench
from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.errors import InputError, RunnerUnavailableError
from gmmvit_deploy.parity.check import check_parity
from gmmvit_deploy.runtimes.programs.openvino import has_bf16
from gmmvit_deploy.runtimes.runners._openvino import OpenVinoRunner
from gmmvit_deploy.runtimes.runners.open import open_runner
from gmmvit_deploy.runtimes.runners.runner import Runner

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
