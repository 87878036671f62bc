"""Time programs in turn, and leave out those that cannot win, that fail a check, or that gain nothing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.bundle.choices import Candidate, Measured
from gmmvit_deploy.errors import InputError, RunnerUnavailableError
from gmmvit_deploy.optimize._graphs import Form
from gmmvit_deploy.parity.judgement import Judgement
from gmmvit_deploy.optimize._programs import Program
from gmmvit_deploy.runtimes.programs.turns import TimeRatio, ratio_of, seconds_in_turn
from gmmvit_deploy.runtimes.runners.runner import Runner

__all__ = ["Race"]

_LONGER = 3
"""The last measurement takes so many times as long as the first look."""


class Race:
    """The programs that are left, and why the others are not.

    base: the fastest float32 program, whose speed is 1.
    """

    base: Program

    def __init__(self, opened: dict[Program, Runner], left_out: dict[Program, str]) -> None:
        """opened: program → its runner.  left_out: program → why it cannot run here."""
        self._opened, self._why = opened, dict(left_out)
        self._speeds: dict[Program, Measured] = {}
        self._seconds: dict[Program, float] = {}
        self._judgements: dict[Program, Judgement] = {}

    @property
    def base_label(self) -> str:
        """The base, as `Candidate.label`."""
        return self._candidate(self.base).label

    @property
    def _running(self) -> list[Program]:
        return [program for program in self._opened if program not in self._why]

    @property
    def runners(self) -> list[Runner]:
        """The runners that are left, in the order in which they were opened."""
        return [self._opened[program] for program in self._running]

    @property
    def passed(self) -> list[Program]:
        """The programs that are left, the fastest first."""
        return sorted(self._running, key=lambda program: -self._speeds[program].value)

    def look(self, inputs: NDArray[np.generic]) -> None:
        """Time all programs on a batch, and leave out those that are slower than the fastest in float32.

        Float32 programs remain: a machine that lacks the chosen one takes the next.
        Errors: RunnerUnavailableError when no float32 program can run.
        """
        self._inputs = inputs
        for program, runner in self._opened.items():
            if not runner.takes(len(inputs)):
                self._why[program] = f"it takes no batch of {len(inputs)}"
        if not any(program.precision == "fp32" for program in self._running):
            reasons = "; ".join(f"{program.words}: {why}" for program, why in self._why.items())
            raise RunnerUnavailableError(f"no program runs float32 on this machine: {reasons}")
        self._time()
        for program in self._running:
            speed = self._speeds[program]
            if program.precision != "fp32" and speed.high < 1:
                self._why[program] = f"slower than {self.base.words}, so it was not judged"

    def judge(self, judgements: Sequence[Judgement]) -> None:
        """Leave out the programs that may not be chosen.  judgements: in the order of `runners`.

        Errors: InputError when no float32 program is left.
        """
        for program, judgement in zip(self._running, judgements, strict=True):
            self._judgements[program] = judgement
        for program, judgement in self._judgements.items():
            if judgement.why_not:
                self._why[program] = judgement.why_not
        if not any(program.precision == "fp32" for program in self._running):
            raise InputError(
                f"{self.base.words} fails a check: {self._why[self.base]}",
                hint="type gmmvit parity with the same bundle and --data, which says more",
            )

    def measure(self) -> None:
        """Time the programs that are left, for longer, and leave out precisions that are not clearly faster."""
        self._time(times=_LONGER)
        for program in self._running:
            speed = self._speeds[program]
            if program.precision != "fp32" and speed.low <= 1:
                self._why[program] = f"not clearly faster than {self.base.words}"

    def leave_out_other_int8(self, form: Form) -> None:
        """Leave out the int8 programs of another form than that of the bundle's graph."""
        for program in self._running:
            if program.precision == "int8" and program.form != form:
                self._why[program] = f"a bundle holds one int8 graph, and this one holds the {form} form"

    def candidates(self) -> tuple[Candidate, ...]:
        """Return all programs: those that passed, the fastest first, then the measured ones, then the others."""
        others = sorted(self._why, key=lambda program: -self._speeds[program].value if program in self._speeds else 0)
        return tuple(map(self._candidate, [*self.passed, *others]))

    def _time(self, *, times: int = 1) -> None:
        programs = self._running
        seconds = seconds_in_turn([partial(self._opened[one].run, self._inputs) for one in programs], times=times)
        of_each = dict(zip(programs, seconds, strict=True))
        self._seconds |= {program: float(np.median(rounds)) for program, rounds in of_each.items()}
        floats = [program for program in programs if program.precision == "fp32"]
        self.base = min(floats, key=lambda program: self._seconds[program])
        self._speeds |= {
            program: _measured(ratio_of(of_each[self.base], rounds)) for program, rounds in of_each.items()
        }

    def _candidate(self, program: Program) -> Candidate:
        judgement = self._judgements.get(program, Judgement())
        runner = self._opened.get(program)
        graph = runner.graph if runner is not None else None
        return Candidate(
            runner=program.runner,
            precision=program.precision,
            form=program.form,
            passed=program not in self._why,
            graph_sha256=graph.sha256 if graph is not None else "",
            reason=self._why.get(program, ""),
            accuracy=judgement.accuracy,
            judged=judgement.judged,
            images_to_settle=judgement.images_to_settle,
            speed=self._speeds.get(program),
            seconds=self._seconds.get(program),
        )


def _measured(ratio: TimeRatio) -> Measured:
    return Measured(value=ratio.median, low=ratio.low, high=ratio.high)
