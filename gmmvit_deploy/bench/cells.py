"""Measure several runners in the same rounds, in a random order: all slow down alike if the machine does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.bench.outputs import Answers, Expected, OutputCheck
from gmmvit_deploy.inference.precision import Precision
from gmmvit_deploy.intervals import Measured
from gmmvit_deploy.measure.load import ScenarioName, Work, drive
from gmmvit_deploy.measure.statistics import ENOUGH, percentiles, ratio, spread
from gmmvit_deploy.measure.turns import seconds_of, settle
from gmmvit_deploy.progress import OnProgress, Progress, ignore
from gmmvit_deploy.runtimes.runners.runner import Device, Runner

_WARM_UPS = 3
_MIN_QUERIES = ENOUGH[0.9]  # minimum number of queries of a `Cell`: as many as a p90 needs
_MAX_CALLERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """batches: for latencies; the throughput is measured at the largest.  seconds: for each `Cell`, over all rounds."""

    batches: tuple[int, ...] = (1, 8, 64)
    rounds: int = 10
    seconds: float = 4.0


@dataclass(slots=True, kw_only=True, eq=False)
class Cell:
    """The measurements of a runner in a scenario of LoadGen (`measure.load`) with a batch size.

    rounds: the latencies of the queries of each round, in ms.  seconds, samples: of each round.
    """

    runner: str
    precision: Precision
    device: Device
    scenario: ScenarioName
    batch: int
    outputs: OutputCheck
    rounds: list[NDArray[Any]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.runner}, {self.scenario}" + (f", batch {self.batch}" if self.batch > 1 else "")

    @property
    def times(self) -> list[float]:
        """The median latency of each round in ms; in Offline, each round's time divided by its number of samples."""
        if self.scenario == "Offline":
            return [1e3 * took / count for took, count in zip(self.seconds, self.samples, strict=True)]
        return [float(np.median(latencies)) for latencies in self.rounds]

    @property
    def median_ms(self) -> float:
        return float(np.median(self.times))

    @property
    def spread(self) -> float:
        return spread(self.times)

    @property
    def samples_per_second(self) -> float:
        """The throughput of the median round."""
        return (1 if self.scenario == "Offline" else self.batch) * 1e3 / self.median_ms

    @property
    def queries(self) -> int:
        return sum(map(len, self.rounds))

    @property
    def percentiles(self) -> dict[str, dict[str, float | None]]:
        """The percentiles over all rounds.  Empty in Offline, where all samples wait in a queue from the start."""
        return {} if self.scenario == "Offline" else percentiles(np.concatenate(self.rounds))


def measure(
    runners: Sequence[Runner],
    inputs: NDArray[Any],
    expected: Expected,
    plan: Plan,
    *,
    on_progress: OnProgress = ignore,
) -> list[Cell]:
    """Measure every runner at every batch size that it takes, on inputs (N, …).  Wrong answers raise no error."""
    turns = [_Turn(runner, work, expected) for runner in runners for work in _works(runner, inputs, plan)]
    generator = np.random.default_rng(0)
    for number in range(plan.rounds):
        for place, index in enumerate(generator.permutation(len(turns))):
            done, total = number * len(turns) + place, plan.rounds * len(turns)
            on_progress(Progress(f"round {number + 1}: {turns[index].name}", done, total))
            turns[index].take(number)
    return [turn.cell() for turn in turns]


def ratios(cells: Sequence[Cell]) -> list[tuple[Cell, Cell, Measured]]:
    """Return (cell, first, time of cell / time of first) for every cell; first: of the same scenario and batch size."""
    compared = []
    for cell in cells:
        first = next(other for other in cells if (other.scenario, other.batch) == (cell.scenario, cell.batch))
        if cell is not first:
            compared.append((cell, first, ratio(cell.times, first.times)))
    return compared


def _works(runner: Runner, inputs: NDArray[Any], plan: Plan) -> list[Work]:
    works: list[Work] = []
    for batch in plan.batches:
        if not runner.takes(batch) or batch > len(inputs):
            continue
        took = _warmed_up(runner, inputs[:batch])
        queries = max(math.ceil(_MIN_QUERIES / plan.rounds), round(plan.seconds / plan.rounds / took))
        scenario: ScenarioName = "SingleStream" if batch == 1 else "MultiStream"
        works.append(
            Work(scenario=scenario, inputs=inputs, queries=queries, batch=batch, in_thread=runner.needs_own_thread)
        )
    batch = max((size for size in plan.batches if runner.takes(size) and size <= len(inputs)), default=1)
    took = _warmed_up(runner, inputs[:batch])
    callers = min(_MAX_CALLERS, runner.callers)
    samples = batch * max(2 * callers, round(plan.seconds / plan.rounds / took))
    return [*works, Work(scenario="Offline", inputs=inputs, queries=samples, batch=batch, callers=callers)]


def _warmed_up(runner: Runner, batch: NDArray[Any]) -> float:
    """Return the seconds of the fastest warm-up run.  The first runs are slower if the runner compiles then."""
    return max(min(seconds_of(partial(runner.run, batch)) for _ in range(_WARM_UPS)), 1e-6)


class _Turn:
    def __init__(self, runner: Runner, work: Work, expected: Expected) -> None:
        self._runner, self._work, self._answers = runner, work, Answers(expected)
        self._runs: list[tuple[NDArray[Any], float, int]] = []
        self._complaints: set[str] = set()

    @property
    def name(self) -> str:
        return f"{self._runner.label}, {self._work.scenario}, batch {self._work.batch}"

    def take(self, number: int) -> None:
        work = self._work
        # The threads of the runner before would slow this turn down, by up to half the time of a batch of 1.
        settle(partial(self._runner.run, work.inputs[: work.batch]))
        # All runners of a round get the same samples; the samples differ between rounds.
        run = drive(self._runner.run, replace(work, seed=work.seed + number))
        self._runs.append((run.latencies_ms, run.seconds, len(run.indices)))
        self._complaints.update(run.complaints)
        self._answers.add(run.indices, run.outputs)

    def cell(self) -> Cell:
        runner = self._runner
        return Cell(
            runner=runner.label,
            precision=runner.precision,
            device=runner.device,
            scenario=self._work.scenario,
            batch=self._work.batch,
            outputs=self._answers.check(runner.precision, runner.form),
            rounds=[latencies for latencies, _, _ in self._runs],
            seconds=[took for _, took, _ in self._runs],
            samples=[count for *_, count in self._runs],
            complaints=sorted(self._complaints),
        )
