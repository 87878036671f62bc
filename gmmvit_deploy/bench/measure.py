"""Several runners side by side: each round gives every runner its turn, in an order that is drawn anew.

A machine that slows down, slows down for all. Ratios are taken within rounds.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.bench.loadgen import LoadRun, ScenarioName, Work, drive
from gmmvit_deploy.bench.outputs import Expected, OutputCheck
from gmmvit_deploy.bench.statistics import ENOUGH, Percentile, Ratio, percentiles, ratio, spread
from gmmvit_deploy.progress import OnProgress, Progress, ignore
from gmmvit_deploy.runners.runner import Device, Runner

__all__ = ["REST_S", "Cell", "Plan", "measure", "ratios"]

_WARM_UPS = 3
REST_S = 0.03
"""Between the turns of two runners."""
_LEAST = ENOUGH[0.9]  # no cell ends with fewer queries than a p90 needs
_MOST_CALLERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """batches: of latencies; offline: throughput with everything known at once, besides.

    rounds: turns that each runner gets.  seconds: about how long each cell is measured in all.
    """

    batches: tuple[int, ...] = (1, 8, 64)
    offline: bool = True
    rounds: int = 10
    seconds: float = 4.0


@dataclass(slots=True, kw_only=True, eq=False)
class Cell:
    """One runner in one scenario at one batch.

    rounds: latencies in ms of each round's queries.  seconds, samples: of each round.
    """

    runner: str
    precision: str
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
        """What rounds are compared by: the median latency, or in Offline the time a sample took, in ms."""
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
        """Of the median round."""
        return (1 if self.scenario == "Offline" else self.batch) * 1e3 / self.median_ms

    @property
    def queries(self) -> int:
        return sum(map(len, self.rounds))

    @property
    def percentiles(self) -> tuple[Percentile, ...]:
        """Of all rounds together; of Offline there are none, whose latencies are places in a queue."""
        return () if self.scenario == "Offline" else percentiles(np.concatenate(self.rounds))


def measure(
    runners: Sequence[Runner],
    inputs: NDArray[Any],
    expected: Expected,
    plan: Plan,
    *,
    on_progress: OnProgress = ignore,
) -> list[Cell]:
    """Every runner at every batch that it takes.

    inputs (N, …): what samples are drawn from; N at least the largest batch.
    Errors: whatever a runner raises; wrong answers are no error but an `OutputCheck` that is not right.
    """
    turns = [_Turn(runner, work, expected) for runner in runners for work in _works(runner, inputs, plan)]
    generator = np.random.default_rng(0)
    for number in range(plan.rounds):
        for place, index in enumerate(generator.permutation(len(turns))):
            done, total = number * len(turns) + place, plan.rounds * len(turns)
            on_progress(Progress(f"round {number + 1}: {turns[index].name}", done, total))
            turns[index].take(number)
    return [turn.cell() for turn in turns]


def ratios(cells: Sequence[Cell]) -> list[tuple[Cell, Cell, Ratio]]:
    """(one, the first runner in the same scenario and batch, time of the one over the first's)."""
    found = []
    for cell in cells:
        first = next(one for one in cells if (one.scenario, one.batch) == (cell.scenario, cell.batch))
        if cell is not first:
            found.append((cell, first, ratio(cell.times, first.times)))
    return found


def _works(runner: Runner, inputs: NDArray[Any], plan: Plan) -> list[Work]:
    """What a runner does in each round, at the batches that it takes."""
    works: list[Work] = []
    for batch in plan.batches:
        if not runner.takes(batch) or batch > len(inputs):
            continue
        took = _warmed_up(runner, inputs[:batch])
        queries = max(math.ceil(_LEAST / plan.rounds), round(plan.seconds / plan.rounds / took))
        scenario: ScenarioName = "SingleStream" if batch == 1 else "MultiStream"
        works.append(
            Work(scenario=scenario, inputs=inputs, queries=queries, batch=batch, in_thread=runner.needs_own_thread)
        )
    if plan.offline:
        batch = max((one for one in plan.batches if runner.takes(one) and one <= len(inputs)), default=1)
        took = _warmed_up(runner, inputs[:batch])
        callers = min(_MOST_CALLERS, runner.callers)
        samples = batch * max(2 * callers, round(plan.seconds / plan.rounds / took))
        works.append(Work(scenario="Offline", inputs=inputs, queries=samples, batch=batch, callers=callers))
    return works


def _warmed_up(runner: Runner, batch: NDArray[Any]) -> float:
    """Seconds that a batch takes once everything is in place; compiling and the first touch are not measured."""
    times = []
    for _ in range(_WARM_UPS):
        start = time.perf_counter()
        runner.run(batch)
        times.append(time.perf_counter() - start)
    return max(min(times), 1e-6)


class _Turn:
    """Collects one cell, a round at a time."""

    def __init__(self, runner: Runner, work: Work, expected: Expected) -> None:
        self._runner, self._work, self._expected = runner, work, expected
        self._runs: list[tuple[NDArray[Any], float, int]] = []
        self._complaints: set[str] = set()
        self._digest = hashlib.sha256()
        self._largest = 0.0
        self._answers = 0

    @property
    def name(self) -> str:
        return f"{self._runner.label}, {self._work.scenario}, batch {self._work.batch}"

    def take(self, number: int) -> None:
        work = self._work
        # The threads of whoever ran before still spin for some milliseconds, and would be measured with this one:
        # seen as up to half of a batch of 1. Then one run that is not timed, for caches and threads of its own.
        time.sleep(REST_S)
        self._runner.run(work.inputs[: work.batch])
        # Other samples in every round, the same ones for every runner.
        run = drive(self._runner.run, replace(work, seed=work.seed + number))
        self._note(run)

    def _note(self, run: LoadRun) -> None:
        self._runs.append((run.latencies_ms, run.seconds, len(run.indices)))
        self._complaints.update(run.complaints)
        self._digest.update(run.outputs_sha256.encode())
        found = self._expected.largest(run.indices, run.outputs)
        self._largest = math.nan if math.isnan(found + self._largest) else max(self._largest, found)
        self._answers += len(run.indices)

    def cell(self) -> Cell:
        precision = self._runner.precision
        return Cell(
            runner=self._runner.label,
            precision=precision,
            device=self._runner.device,
            scenario=self._work.scenario,
            batch=self._work.batch,
            outputs=self._expected.judged(
                precision, answers=self._answers, largest=self._largest, sha256=self._digest.hexdigest()
            ),
            rounds=[latencies for latencies, _, _ in self._runs],
            seconds=[took for _, took, _ in self._runs],
            samples=[count for *_, count in self._runs],
            complaints=sorted(self._complaints),
        )
