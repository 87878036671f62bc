"""The race compares like with like, survives a program that fails, and lets no chance choose a precision."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from gmmvit_deploy.bundle.choices import Candidate
from gmmvit_deploy.errors import RunnerUnavailableError
from gmmvit_deploy.inference.runner_name import RunnerName
from gmmvit_deploy.optimize import _race
from gmmvit_deploy.parity.judgement import Judgement


class Timed:
    """Stands for a runner that takes the seconds of the look, then those of the last measurement."""

    graph = record = None

    def __init__(self, *seconds: float) -> None:
        self.seconds = list(seconds)

    def takes(self, batch: int) -> bool:
        return True

    def run(self, batch: Any) -> None:
        if not self.seconds:
            raise RunnerUnavailableError("no memory left")

    def close(self) -> None:
        pass


def turns_of(monkeypatch: pytest.MonkeyPatch, rounds: int = 8) -> None:
    def seconds(programs: Any, **_: Any) -> list[list[float]]:
        return [[run.func.__self__.seconds.pop(0)] * rounds for run in programs]

    monkeypatch.setattr(_race, "seconds_in_turn", seconds)


def raced(
    monkeypatch: pytest.MonkeyPatch,
    rounds: int = 8,
    why_not: Mapping[str, str] = MappingProxyType({}),
    **runners: Timed,
) -> list[Candidate]:
    """Race runners, named ``name_of_runner__precision``, and return the candidates.

    why_not: program → why it may not be chosen.
    """
    turns_of(monkeypatch, rounds)
    opened: Any = {}
    for name, runner in runners.items():
        opened[RunnerName.parse(name.replace("__", ":").replace("_kernels", "+kernels").replace("_", "-"))] = runner
    race = _race.Race(opened, {})
    race.look(np.zeros((1, 1)))
    while programs := race.next_to_judge():
        race.judge({program: Judgement(why_not=why_not.get(str(program), "")) for program in programs})
    race.measure()
    return list(race.candidates())


def test_a_program_that_fails_while_it_runs_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = raced(monkeypatch, onnxruntime__fp32=Timed(1, 1), openvino__bf16=Timed())
    assert (str(first.runner), first.passed) == ("onnxruntime", True)
    assert second.reason == "it fails when it runs: no memory left"


def test_on_a_gpu_programs_of_cpus_remain_and_engines_are_only_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    candidates = raced(
        monkeypatch,
        onnxruntime__fp32=Timed(10, 10),
        openvino__bf16=Timed(5, 5),
        onnxruntime_cuda__fp32=Timed(1, 1),
        tensorrt__fp16=Timed(0.1, 0.1),
    )
    passed = [str(one.runner) for one in candidates if one.passed]
    assert passed == ["onnxruntime-cuda", "openvino:bf16", "onnxruntime"]
    engine: Any = candidates[-1]
    assert "gmmvit repository --backend tensorrt --engine" in engine.reason
    assert engine.speed.value == pytest.approx(10)


def test_what_cannot_win_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    candidates = raced(
        monkeypatch,
        why_not={"openvino+kernels:int8-static": "too many decisions change"},
        onnxruntime__fp32=Timed(4, 4),
        onnxruntime__bf16=Timed(3, 3),
        openvino__bf16=Timed(3, 3),
        openvino_kernels__bf16=Timed(3),
        openvino_kernels__int8_dynamic=Timed(2, 2),
        openvino_kernels__int8_static=Timed(1),
    )
    reasons = {str(one.runner): one.reason for one in candidates}
    faster = "openvino+kernels:int8-dynamic"
    assert reasons == {
        "onnxruntime": "",
        "openvino+kernels:int8-dynamic": "",
        "openvino:bf16": "",  # runs without our kernels
        "onnxruntime:bf16": "",
        "openvino+kernels:int8-static": "too many decisions change",
        "openvino+kernels:bf16": f"slower than {faster}, which passes the gate, so it was not judged",
    }


def test_few_rounds_choose_no_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    best, other = raced(monkeypatch, rounds=5, onnxruntime__fp32=Timed(1, 1), openvino__bf16=Timed(0.5, 0.5))
    assert best.runner.precision == "fp32"
    assert other.reason == "not clearly faster than onnxruntime in float32"


def test_all_speeds_are_relative_to_the_base_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    runners = {"onnxruntime__fp32": Timed(1, 1.5), "openvino__fp32": Timed(1.1, 1), "onnxruntime__fp16": Timed(2.2)}
    best, *_, slowest = raced(monkeypatch, **runners)
    assert (str(best.runner), slowest.speed and slowest.speed.value) == ("openvino", pytest.approx(0.5))


def test_what_failed_is_the_first_of_a_cascade_and_timed_again_beside_merged_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns_of(monkeypatch)
    base, static, merged = map(RunnerName.parse, ("openvino", "openvino:int8-static", "openvino:int8-merged"))
    race = _race.Race({base: Timed(4, 8), static: Timed(1, 2)}, {})  # type: ignore[dict-item]
    race.look(np.zeros((1, 1)))
    assert race.firsts == []
    for program, why_not in ((base, ""), (static, "too many decisions change")):
        race.judge({program: Judgement(why_not=why_not)})
    assert race.firsts == [static]
    race.join({merged: Timed(1)}, {})  # type: ignore[dict-item]
    assert list(race.next_to_judge()) == [merged]
    race.judge({merged: Judgement(why_not="too many decisions change")})
    assert race.firsts == [merged, static]
    speeds = {one.runner: one.speed and one.speed.value for one in race.candidates()}
    assert speeds == {base: 1, static: 4, merged: 8}


@pytest.mark.parametrize(
    ("rival", "seconds", "tried"),
    [
        ("openvino:int8-dynamic", 1.2, False),  # a cascade would be slower
        ("openvino:int8-dynamic", 2, True),
        ("openvino:bf16", 1.2, True),
        ("tensorrt:int8", 0.1, True),  # where the GPU is missing, programs of the CPU are taken
    ],
)
def test_a_cascade_is_tried_unless_a_program_of_the_cpu_passes_nearly_as_fast(
    rival: str, seconds: float, tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns_of(monkeypatch)
    base, static, other = map(RunnerName.parse, ("openvino", "openvino:int8-static", rival))
    race = _race.Race({base: Timed(4), static: Timed(1), other: Timed(seconds)}, {})  # type: ignore[dict-item]
    race.look(np.zeros((1, 1)))
    race.judge({base: Judgement(), static: Judgement(why_not="too many decisions change"), other: Judgement()})
    assert race.firsts == ([static] if tried else [])
