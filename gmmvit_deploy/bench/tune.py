"""Search the Triton settings that sustain the highest arrival rate with a p99 latency within a bound.

The search tries each runner with default settings, then divides the cores among 2, 4, 8, … instances of the best, as
long as the rate rises, then tries queue delays (the maximum time that a request waits in the batcher). Every trial
starts a server, checks its answers, and searches the highest rate of Poisson arrivals within the bound.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from gmmvit_deploy.bench.machine import MachineState, describe_machine, machine_state
from gmmvit_deploy.bench.outputs import Expected
from gmmvit_deploy.bench.served_load import LoadSearch, search_rate
from gmmvit_deploy.bundle.artifacts import Bundle, tool_versions
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.exporting.golden import fresh_inputs
from gmmvit_deploy.files.leftovers import temporary_folder
from gmmvit_deploy.files.writing import require_free
from gmmvit_deploy.inference.cores import cores
from gmmvit_deploy.inference.runner_name import RunnerName
from gmmvit_deploy.measure.load import Work, drive
from gmmvit_deploy.progress import OnProgress, Progress, detailed, ignore
from gmmvit_deploy.reports.reporting import described_bundle, plain
from gmmvit_deploy.runtimes.runners.triton import TritonRunner
from gmmvit_deploy.serving.installs import find_server
from gmmvit_deploy.serving.names import TUNING_FILE
from gmmvit_deploy.serving.options import RepositoryOptions
from gmmvit_deploy.serving.processes import peak_bytes
from gmmvit_deploy.serving.repository import repository_from_bundle
from gmmvit_deploy.serving.repository_runner import resolved_options
from gmmvit_deploy.serving.server import ServerOptions, TritonServer

_FORMAT = "gmmvit-tuning/1"
_DELAYS_US = (0, 500, 2000)
_INPUTS = 128
_CLIENT_BATCH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """Options of a tuning run, which measures speed only.

    bound_ms: the largest p99 latency, measured by the client.
    runners: those to try; None tries the bundle's choice for this machine (`runners.chosen`).
    """

    bound_ms: float
    runners: tuple[RunnerName, ...] | None = None
    name: str = "gmmvit"

    def __post_init__(self) -> None:
        if not self.bound_ms > 0:
            raise InputError(f"the latency bound is {self.bound_ms:g} ms; expected more than 0")
        if self.runners is not None and (not self.runners or len(set(self.runners)) < len(self.runners)):
            raise InputError("expected distinct runners, such as onnxruntime,openvino:bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """full_rate: the samples a second when all are available at once.
    peak_bytes: the sum of the largest resident sizes of the server and its workers.
    """

    settings: RepositoryOptions
    full_rate: float
    load: LoadSearch
    peak_bytes: int

    @property
    def rate(self) -> float:
        """The highest rate within the bound, in requests a second; 0 without one, or with wrong answers."""
        return self.load.best.rate if self.load.best is not None and self.load.outputs.right else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """trials: in the order in which they ran.  notes: those of `choose_runner`, if no runner was named."""

    options: TuneOptions
    bundle: dict[str, Any]
    machine: dict[str, Any]
    before: MachineState
    after: MachineState
    trials: tuple[Trial, ...]
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Trial:
        """The trial with the highest rate within the bound."""
        return max(self.trials, key=lambda trial: trial.rate)

    def to_json(self) -> dict[str, Any]:
        best = self.best
        data = {
            "format": _FORMAT,
            "bound_ms": self.options.bound_ms,
            "best": _described(best),
            "rate": best.rate,
            "peak_bytes": best.peak_bytes,
            "trials": [
                {
                    "settings": _described(trial),
                    "rate": trial.rate,
                    "full_rate": trial.full_rate,
                    "peak_bytes": trial.peak_bytes,
                    "load": asdict(trial.load),
                }
                for trial in self.trials
            ],
            "bundle": self.bundle,
            "machine": self.machine,
            "before": asdict(self.before),
            "after": asdict(self.after),
            "versions": tool_versions(),
        }
        return plain(data)  # type: ignore[no-any-return]


def tune(
    bundle: Bundle,
    out: Path,
    options: TuneOptions,
    *,
    force: bool = False,
    on_progress: OnProgress = ignore,
) -> Tuning:
    """Search the best settings, then write a repository with these settings and with `TUNING_FILE` to ``out``.

    Errors: OutputError when ``out`` exists and ``force`` is false; InputError when no setting stays within the bound,
    or the bundle lacks a graph; MissingDependencyError; ServerError. After an error, nothing is written.
    """
    require_free(out, force=force)
    inputs = fresh_inputs(bundle, _INPUTS)
    expected = Expected(bundle, inputs)
    before = machine_state()
    trials: list[Trial] = []

    def tried(candidates: Iterable[RepositoryOptions], *, later: int = 0) -> Trial:
        """Try the new candidates, and return the best trial so far.  later: how many follow, for the progress."""
        untried = [settings for settings in candidates if all(settings != trial.settings for trial in trials)]
        total = len(trials) + len(untried) + later
        for settings in untried:
            step = Progress(_words(settings), len(trials), total)
            on_progress(step)
            trials.append(_trial(bundle, inputs, expected, settings, options, on_progress=detailed(step, on_progress)))
        return max(trials, key=lambda trial: trial.rate)

    delays = len(_DELAYS_US) - 1  # the earlier trials already used the first delay
    typed = [RepositoryOptions(name=options.name, runner=runner) for runner in options.runners or (None,)]
    resolved = [resolved_options(bundle, settings) for settings in typed]
    best = tried([settings for settings, _ in resolved], later=(cores() > 1) + delays)
    instances = 2
    while instances <= cores():
        divided = replace(best.settings, instances=instances, threads=cores() // instances)
        best = tried([divided], later=delays)
        if best.settings != divided:
            break  # more instances would be slower still
        instances *= 2
    best = tried(replace(best.settings, max_queue_delay_us=delay) for delay in _DELAYS_US)
    if not best.rate:
        nearest = min(trial.load.points[0].p99_ms for trial in trials)
        raise InputError(
            f"no setting keeps p99 below {options.bound_ms:g} ms: the lowest p99 was {nearest:.1f} ms",
            hint="type a higher --bound-ms, or add a faster runner to --runner",
        )
    tuning = Tuning(
        options=options,
        bundle=described_bundle(bundle),
        machine=describe_machine(),
        before=before,
        after=machine_state(),
        trials=tuple(trials),
        notes=tuple(dict.fromkeys(line for _, notes in resolved for line in notes)),
    )
    text = json.dumps(tuning.to_json(), indent=1, allow_nan=False) + "\n"
    repository_from_bundle(bundle, out, best.settings, notes={TUNING_FILE: text}, force=force)
    return tuning


def _trial(
    bundle: Bundle,
    inputs: NDArray[Any],
    expected: Expected,
    settings: RepositoryOptions,
    options: TuneOptions,
    *,
    on_progress: OnProgress = ignore,
) -> Trial:
    ports = ServerOptions(http_port=0, grpc_port=0, metrics_port=0)
    with temporary_folder("tune") as folder:
        repository = repository_from_bundle(bundle, folder / "models", settings)
        install = find_server(on_progress=on_progress)
        with (
            TritonServer(repository.path, install=install, options=ports) as server,
            TritonRunner(bundle, server.grpc_url, model=settings.name) as runner,
        ):
            runner.rows(inputs)
            batch = min(_CLIENT_BATCH, runner.max_batch)
            everything = Work(scenario="Offline", inputs=inputs, queries=4 * len(inputs), batch=batch, callers=4)
            full_rate = max(drive(runner.run, everything).samples_per_second for _ in range(2))
            load = search_rate(
                runner, inputs, expected, bound_ms=options.bound_ms, max_rate=full_rate, on_progress=on_progress
            )
            peak = peak_bytes((server.pid, *(worker.pid for worker in server.workers)))
    return Trial(settings=settings, full_rate=full_rate, load=load, peak_bytes=peak)


def _described(trial: Trial) -> dict[str, Any]:
    names = ("backend", "instances", "threads", "max_queue_delay_us")
    return {"runner": str(trial.settings.runner), **{name: getattr(trial.settings, name) for name in names}}


def _words(settings: RepositoryOptions) -> str:
    return (
        f"{settings.runner}, {settings.instances} × {settings.threads or 'all'} threads, "
        f"queue delay {settings.max_queue_delay_us} µs"
    )


def settings_table(trials: Sequence[Trial]) -> list[tuple[str, ...]]:
    """Return a row for each trial: settings, highest rate within the bound, p99 at it, rate of all at once, remark."""
    best = max(trials, key=lambda trial: trial.rate)
    rows: list[tuple[str, ...]] = []
    for trial in trials:
        point = trial.load.best
        p99 = f"{point.p99_ms:.1f} ms" if point else ""
        mark = "best" if trial is best and trial.rate else ("WRONG answers" if not trial.load.outputs.right else "")
        rows.append((_words(trial.settings), f"{trial.rate:,.0f}", p99, f"{trial.full_rate:,.0f}", mark))
    return rows
