"""The result of a benchmark, and the reasons why a result is invalid."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from gmmvit_deploy.bench.cells import Cell, ratios
from gmmvit_deploy.bench.machine import MachineState
from gmmvit_deploy.bench.roofline import NetworkWork, Roofline
from gmmvit_deploy.bench.served_load import LoadSearch
from gmmvit_deploy.bench.waterfall import Step
from gmmvit_deploy.measure.statistics import ENOUGH
from gmmvit_deploy.reports.reporting import plain

FORMAT = "gmmvit-bench/1"
MAX_SPREAD = 0.25
"""The maximum spread of a cell's rounds (`statistics.spread`), and the maximum relative width of a ratio's interval."""
MAX_OTHERS = 0.10
"""The maximum share of the cores, or of a GPU, that other programs may use."""
MAX_STOLEN = 0.05
"""The maximum share of the cores that the hypervisor may take."""
MAX_CLOCK_CHANGE = 0.10
"""The maximum relative change of `MachineState.spin_ms` during a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A runner's share of the roofline: the minimum time on this machine divided by the measured time."""

    runner: str
    batch: int
    share: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BenchReport:
    """The result of a benchmark.

    runners: label → the runner's program and settings.  before, after: the machine while this process was idle.
    steps: the waterfall of a single image.  skipped: the reason of each measurement that was left out.
    """

    bundle: Mapping[str, Any]
    data: Mapping[str, Any]
    settings: Mapping[str, Any]
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    runners: Mapping[str, Mapping[str, str]]
    before: MachineState
    after: MachineState
    cells: tuple[Cell, ...]
    works: tuple[NetworkWork, ...]
    rooflines: tuple[Roofline, ...]
    steps: tuple[Step, ...]
    loads: tuple[LoadSearch, ...]
    skipped: tuple[str, ...] = ()

    @property
    def reasons(self) -> tuple[str, ...]:
        """The reasons why the run is invalid; empty if the run is valid."""
        return (*reasons_against(self.cells, self.loads, self.before, self.after), *impossible(self.shares()))

    @property
    def verdict(self) -> Literal["VALID", "INVALID"]:
        return "INVALID" if self.reasons else "VALID"

    @property
    def wrong(self) -> list[str]:
        """Return the reasons that report wrong answers of a runner."""
        return [reason for reason in self.reasons if _WRONG in reason]

    def shares(self) -> list[Share]:
        """Return the share of the roofline for every cell with latencies and a roofline of its precision and device."""
        works = {work.batch: work for work in self.works}
        lines = {(line.precision, line.device): line for line in self.rooflines}
        measured = []
        for cell in self.cells:
            line = lines.get((cell.precision, cell.device))
            if cell.scenario != "Offline" and cell.batch in works and line is not None:
                share = line.min_ms(works[cell.batch]) / cell.median_ms
                measured.append(Share(runner=cell.runner, batch=cell.batch, share=share))
        return measured

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain JSON values.  NaN and infinite values become null."""
        data = {
            "format": FORMAT,
            "verdict": self.verdict,
            "reasons": self.reasons,
            "skipped": self.skipped,
            "bundle": self.bundle,
            "data": self.data,
            "settings": self.settings,
            "machine": self.machine,
            "versions": self.versions,
            "runners": self.runners,
            "before": asdict(self.before),
            "after": asdict(self.after),
            "cells": [_cell(cell) for cell in self.cells],
            "ratios": [
                {
                    "runner": compared.runner,
                    "over": first.runner,
                    "scenario": compared.scenario,
                    "batch": compared.batch,
                    **asdict(ratio),
                }
                for compared, first, ratio in ratios(self.cells)
            ],
            "rooflines": [_roofline(line) for line in self.rooflines],
            "shares": [asdict(share) for share in self.shares()],
            "waterfall": [asdict(step) for step in self.steps],
            "loads": [asdict(load) for load in self.loads],
        }
        return plain(data)  # type: ignore[no-any-return]


_WRONG = "answers were wrong"


def reasons_against(
    cells: Sequence[Cell], loads: Sequence[LoadSearch], before: MachineState, after: MachineState
) -> list[str]:
    reasons = []
    for name, outputs in [
        *((cell.name, cell.outputs) for cell in cells),
        *((load.runner, load.outputs) for load in loads),
    ]:
        if not outputs.right:
            reasons.append(
                f"{name}: {_WRONG}: a logit is {outputs.largest:.3g} away from PyTorch's float64 logit, "
                f"expected at most {outputs.limit:.3g}"
            )
    for cell in cells:
        if cell.scenario != "Offline" and cell.queries < ENOUGH[0.9]:
            enough = f"expected at least {ENOUGH[0.9]} for a p90, got {cell.queries}"
            reasons.append(f"{cell.name}: too few queries: {enough}")
        if cell.spread > MAX_SPREAD:
            reasons.append(
                f"{cell.name}: unstable: the spread of the rounds is {cell.spread:.0%} of their median, "
                f"expected at most {MAX_SPREAD:.0%}"
            )
        reasons += [f"{cell.name}: LoadGen: {complaint}" for complaint in cell.complaints]
    return reasons + machine_reasons(before, after)


def impossible(shares: Iterable[Share]) -> list[str]:
    """Return a reason for every share above 1: the machine was slower while the roofline was measured."""
    return [
        f"unstable: {share.runner}, batch {share.batch}: {share.share:.0%} of the roofline, expected at most 100%: the "
        "machine was slower while the roofline was measured"
        for share in shares
        if share.share > 1
    ]


def machine_reasons(before: MachineState, after: MachineState) -> list[str]:
    """Return the reasons why measurements are invalid, from the machine's states before and after the measurements."""
    reasons = []
    for when, state in (("before", before), ("after", after)):
        if state.others > MAX_OTHERS:
            reasons.append(_busy("other programs took", state.others, "the machine", when, MAX_OTHERS))
        if state.stolen > MAX_STOLEN:
            reasons.append(_busy("the hypervisor took", state.stolen, "the machine", when, MAX_STOLEN))
        used = max((gpu.used for gpu in state.gpus), default=0.0)
        if used > MAX_OTHERS:
            reasons.append(_busy("other programs used", used, "a GPU", when, MAX_OTHERS))
    change = after.spin_ms / before.spin_ms - 1
    if abs(change) > MAX_CLOCK_CHANGE:
        reasons.append(
            f"unstable: the time of a fixed computation changed by {change:+.0%} during the run, "
            f"expected at most {MAX_CLOCK_CHANGE:.0%}"
        )
    return reasons


def _busy(who: str, share: float, what: str, when: str, limit: float) -> str:
    return f"machine busy: {who} {share:.0%} of {what} {when} the run, expected at most {limit:.0%}"


def _cell(cell: Cell) -> dict[str, Any]:
    return {
        "runner": cell.runner,
        "precision": cell.precision,
        "device": cell.device,
        "scenario": cell.scenario,
        "batch": cell.batch,
        "queries": cell.queries,
        "median_ms": cell.median_ms,
        "spread": cell.spread,
        "samples_per_second": cell.samples_per_second,
        "percentiles": cell.percentiles,
        "round_ms": cell.times,
        "latencies_ms": [round(float(value), 5) for part in cell.rounds for value in part]
        if cell.scenario != "Offline"
        else [],
        "outputs": {**asdict(cell.outputs), "right": cell.outputs.right},
    }


def _roofline(line: Roofline) -> dict[str, Any]:
    return {
        "precision": line.precision,
        "device": line.device,
        "gflops": line.best.gflops,
        "library": line.best.library,
        "shape": line.best.shape,
        "bandwidth_gb_s": line.bandwidth / 1e9,
    }
