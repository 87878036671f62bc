"""Time programs in turn, and leave out those that cannot win, that fail a check, or that gain nothing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.bundle.choices import Candidate
from gmmvit_deploy.errors import InputError, RunnerUnavailableError
from gmmvit_deploy.inference.runner_name import RunnerName
from gmmvit_deploy.intervals import Measured
from gmmvit_deploy.measure.statistics import ROUNDS_OF_PROOF, ratio
from gmmvit_deploy.measure.turns import seconds_in_turn
from gmmvit_deploy.optimize._programs import PROGRAMS_OF_GPUS
from gmmvit_deploy.parity.judgement import Judgement
from gmmvit_deploy.progress import OnProgress, ignore
from gmmvit_deploy.runtimes.engines.flavors import FLAVORS
from gmmvit_deploy.runtimes.runners.runner import Runner

_LONGER = 3
"""The last measurement takes so many times as long as the first look."""


class Race:
    """The programs that are left, and why the others are not.

    base: the fastest float32 program that can be chosen, whose speed is 1.
    """

    base: RunnerName

    def __init__(self, opened: dict[RunnerName, Runner], left_out: dict[RunnerName, str]) -> None:
        """opened: program → its runner.  left_out: program → why it cannot run here."""
        self._opened, self._why = opened, dict(left_out)
        self._looked: dict[RunnerName, list[float]] = {}
        self._measured: dict[RunnerName, list[float]] = {}
        self._judgements: dict[RunnerName, Judgement] = {}

    @property
    def _running(self) -> list[RunnerName]:
        return [program for program in self._opened if program not in self._why]

    @property
    def runners(self) -> list[Runner]:
        """The runners that are left, in the order in which they were opened."""
        return [self._opened[program] for program in self._running]

    @property
    def passed(self) -> list[RunnerName]:
        """The programs that are left, the fastest first, but none before the base that is not clearly faster."""
        return sorted(self._running, key=self._rank)

    def _rank(self, program: RunnerName) -> tuple[float, bool]:
        speed = self._speed(program)
        if speed is None:
            return 0.0, True
        unproven = program.precision != "fp32" and not self._clearly_faster(program, self.base)
        return -(min(speed.value, 1) if unproven else speed.value), unproven

    @property
    def _floats(self) -> list[RunnerName]:
        """The float32 programs that are left and can be chosen."""
        return [program for program in self._running if program.precision == "fp32" and program.name not in FLAVORS]

    def look(
        self,
        inputs: NDArray[np.generic],
        judged: NDArray[np.generic] | None = None,
        *,
        on_progress: OnProgress = ignore,
    ) -> None:
        """Time all programs on a batch, and leave out those that are slower than the fastest in float32.

        judged: a batch as large as those that judge. Each program must be able to run it, and its first image.
        Programs of CPUs are compared with those of CPUs: where the GPU is missing, they are taken.
        Float32 programs remain: a machine that lacks the chosen one takes the next.
        Errors: RunnerUnavailableError when no float32 program can run.
        """
        self._inputs = inputs
        for program, runner in self._opened.items():
            if not runner.takes(len(inputs)):
                self._why[program] = f"it takes no batch of {len(inputs)}"
                continue
            try:
                runner.run(inputs)
                for batch in () if judged is None else (judged, judged[:1]):
                    if runner.takes(len(batch)):
                        runner.run(batch)
            except Exception as exc:  # each runtime has its own classes, such as that of a GPU without memory
                self._why[program] = f"it fails when it runs: {exc}"
        if not self._floats:
            reasons = "; ".join(f"{program}: {why}" for program, why in self._why.items())
            raise RunnerUnavailableError(f"no program runs float32 on this machine: {reasons}")
        self._looked = self._time(on_progress)
        for program in self._running:
            rival = self._rival(program)
            if program.precision != "fp32" and self._ratio(program, rival).high < 1:
                self._why[program] = f"slower than {rival} in float32, so it was not judged"
        for program in self._why:
            if program in self._opened:
                self._opened[program].close()  # frees the GPU's memory

    def judge(self, judgements: Sequence[Judgement]) -> None:
        """Leave out the programs that may not be chosen.  judgements: in the order of `runners`.

        Errors: InputError when no float32 program is left.
        """
        for program, judgement in zip(self._running, judgements, strict=True):
            self._judgements[program] = judgement
        for program, judgement in self._judgements.items():
            if judgement.why_not:
                self._why[program] = judgement.why_not
        if not self._floats:
            raise InputError(
                f"{self.base} fails a check: {self._why[self.base]}",
                hint="type gmmvit parity with the same bundle and --data, which says more",
            )

    def measure(self, *, on_progress: OnProgress = ignore) -> None:
        """Time the programs that are left, for longer, and leave out precisions that are not clearly faster."""
        self._measured = self._time(on_progress, times=_LONGER)
        for program in self._running:
            rival = self._rival(program)
            if program.precision != "fp32" and not self._clearly_faster(program, rival):
                self._why[program] = f"not clearly faster than {rival} in float32"
            elif program.name in FLAVORS:
                self._why[program] = "served by gmmvit repository --backend tensorrt --engine DIR"

    def candidates(self) -> tuple[Candidate, ...]:
        """Return all programs: those that passed, the fastest first, then the measured ones, then the others."""
        others = sorted(self._why, key=self._rank)
        return tuple(map(self._candidate, [*self.passed, *others]))

    def _time(self, on_progress: OnProgress, *, times: int = 1) -> dict[RunnerName, list[float]]:
        """Return program → the seconds of each round, and set the base."""
        programs = self._running
        runs = [partial(self._opened[program].run, self._inputs) for program in programs]
        seconds = seconds_in_turn(runs, times=times, on_progress=on_progress)
        of_each = dict(zip(programs, seconds, strict=True))
        self.base = min(self._floats, key=lambda program: float(np.median(of_each[program])))
        return of_each

    def _rounds(self, program: RunnerName) -> dict[RunnerName, list[float]]:
        """Return the last measurement that a program was in."""
        return self._measured if program in self._measured else self._looked

    def _rival(self, program: RunnerName) -> RunnerName:
        """Return the float32 program that a program must beat: of CPUs the fastest on the CPU, else the base."""
        seconds = self._rounds(program)
        on_cpu = [rival for rival in self._floats if rival.name not in PROGRAMS_OF_GPUS]
        if program.name in PROGRAMS_OF_GPUS or not on_cpu:
            return self.base
        return min(on_cpu, key=lambda rival: float(np.median(seconds[rival])))

    def _ratio(self, program: RunnerName, rival: RunnerName) -> Measured:
        seconds = self._rounds(program)
        return ratio(seconds[rival], seconds[program])

    def _clearly_faster(self, program: RunnerName, rival: RunnerName) -> bool:
        enough = len(self._rounds(program)[program]) >= ROUNDS_OF_PROOF
        return enough and self._ratio(program, rival).low > 1

    def _speed(self, program: RunnerName) -> Measured | None:
        """Return the speed relative to the base; None for a program that was not timed."""
        return self._ratio(program, self.base) if program in self._rounds(program) else None

    def _candidate(self, program: RunnerName) -> Candidate:
        judgement = self._judgements.get(program, Judgement())
        runner = self._opened.get(program)
        graph = runner.graph if runner is not None else None
        return Candidate(
            runner=program,
            passed=program not in self._why,
            graph_sha256=graph.sha256 if graph is not None else "",
            reason=self._why.get(program, ""),
            accuracy=judgement.accuracy,
            judged=judgement.judged,
            kept=judgement.kept,
            images_to_settle=judgement.images_to_settle,
            lacks_images=judgement.lacks_images,
            speed=self._speed(program),
            seconds=float(np.median(seconds)) if (seconds := self._rounds(program).get(program)) else None,
        )
