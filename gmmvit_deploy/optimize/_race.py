"""Time programs in turn, and leave out those that cannot win, that fail a check, or that gain nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.bundle.choices import Candidate, OnImages
from gmmvit_deploy.errors import InputError, RunnerUnavailableError
from gmmvit_deploy.inference import DEFERRED
from gmmvit_deploy.inference.runner_name import RunnerName
from gmmvit_deploy.intervals import Measured
from gmmvit_deploy.measure.statistics import ENOUGH, ROUNDS_OF_PROOF, nearest_rank, ratio
from gmmvit_deploy.measure.turns import UNTIMED_S, seconds_in_turn, seconds_of, settle
from gmmvit_deploy.optimize._programs import PROGRAMS_OF_GPUS
from gmmvit_deploy.parity.inputs import Batch
from gmmvit_deploy.parity.judgement import Judgement
from gmmvit_deploy.progress import OnProgress, Progress, ignore
from gmmvit_deploy.runtimes.engines.flavors import FLAVORS
from gmmvit_deploy.runtimes.runners.names import CASCADES, ON_CPUS
from gmmvit_deploy.runtimes.runners.runner import Runner

_LONGER = 3
"""The last measurement takes so many times as long as the first look."""
_TIMED_BATCHES = {False: 672, True: 24}
"""The number of single images (False) or of batches on which a cascade is timed; 662 have a 99th percentile."""
_GROUPS = 12
"""The rounds of a cascade: a round is a part of the images, of which some are computed again."""
_CASCADES = 2
"""The number of cascades to try: each is judged as another program."""
_NEARLY = 1.25
"""A cascade that computes a tenth of its images again takes about so many times as long as its first program alone."""
_MIN_GAIN = 1.1
"""The speed of a cascade, relative to float32, from which it is worth its second graph."""


class Race:
    """The programs that are left, and why the others are not.

    base: the fastest float32 program that can be chosen, whose speed is 1.
    """

    base: RunnerName

    def __init__(self, opened: dict[RunnerName, Runner], left_out: dict[RunnerName, str]) -> None:
        """opened: program → its runner.  left_out: program → why it cannot run here."""
        self._opened, self._why = opened, dict(left_out)
        self._timings: list[dict[RunnerName, list[float]]] = []  # of programs that took turns: seconds of each round
        self._expected: dict[RunnerName, float] = {}  # seconds, of cascades
        self._of_cascades: dict[RunnerName, dict[RunnerName, list[float]]] = {}  # its seconds and those of its rivals
        self._on_images: dict[RunnerName, OnImages] = {}
        self._judgements: dict[RunnerName, Judgement] = {}

    @property
    def _running(self) -> list[RunnerName]:
        return [program for program in self._opened if program not in self._why]

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
        self._inputs, self._judged = inputs, judged
        self._try(self._opened)
        if not self._floats:
            reasons = "; ".join(f"{program}: {why}" for program, why in self._why.items())
            raise RunnerUnavailableError(f"no program runs float32 on this machine: {reasons}")
        self._time(self._running, on_progress)
        self._leave_out_slow()

    def join(
        self,
        opened: Mapping[RunnerName, Runner],
        left_out: Mapping[RunnerName, str],
        *,
        on_progress: OnProgress = ignore,
    ) -> None:
        """Add programs that were opened after the others were judged, and look at them as `look` does.

        They are timed beside those that are left, and those that may be the first of a cascade.
        """
        firsts = self.firsts
        self._opened |= opened
        self._why |= left_out
        if opened:
            self._try(opened)
            self._time([*self._running, *firsts], on_progress)
            self._leave_out_slow()

    def _try(self, programs: Iterable[RunnerName]) -> None:
        """Run programs once on each size of batch, and leave out those that cannot."""
        for program in programs:
            runner = self._opened[program]
            if not runner.takes(len(self._inputs)):
                self._why[program] = f"it takes no batch of {len(self._inputs)}"
                continue
            try:
                runner.run(self._inputs)
                for batch in () if self._judged is None else (self._judged, self._judged[:1]):
                    if runner.takes(len(batch)):
                        runner.run(batch)
            except Exception as exc:  # each runtime has its own classes, such as that of a GPU without memory
                self._why[program] = f"it fails when it runs: {exc}"

    def _leave_out_slow(self) -> None:
        """Leave out programs that are not faster than the fastest in float32, of those that are not judged yet."""
        for program in [program for program in self._running if program not in self._judgements]:
            rival = self._rival(program)
            if program.precision != "fp32" and self._ratio(program, rival).value < 1:
                self._why[program] = f"not faster than {rival} in float32, so it was not judged"
        for program in self._why:
            if program in self._opened and program not in self._judgements:
                self._opened[program].close()  # frees the GPU's memory

    def next_to_judge(self) -> dict[RunnerName, Runner]:
        """Return the programs to judge next: those of float32, then those of the graph whose program is the fastest of
        the others; empty when none is left.

        Programs that are slower than one that passed are left out.
        """
        waiting = [program for program in self._running if program not in self._judgements]
        if not self._judgements:
            return {program: self._opened[program] for program in waiting if program.precision == "fp32"}
        for program in waiting:
            if faster := next((rival for rival in self._judgements if self._cannot_beat(program, rival)), None):
                slower = "expected to be slower" if program.cascade else "slower"
                self._why[program] = f"{slower} than {faster}, which passes the gate, so it was not judged"
        left = sorted((program for program in waiting if program not in self._why), key=self._median)
        return {program: self._opened[program] for program in left if program.arithmetic == left[0].arithmetic}

    def _cannot_beat(self, program: RunnerName, rival: RunnerName) -> bool:
        """Return whether a program is slower than one that passed, and that can run wherever the program can.

        A cascade is no rival: how often it computes an image again is known only once it is timed.
        """
        needs_more = rival.runtime != program.runtime or (rival.kernels and not program.kernels)
        if rival in self._why or rival.precision == "fp32" or rival.cascade or rival.name in FLAVORS or needs_more:
            return False
        if program.cascade:
            return self._median(program) > self._median(rival)
        return self._ratio(program, rival).high < 1

    def judge(self, judgements: Mapping[RunnerName, Judgement]) -> None:
        """Leave out the programs that may not be chosen.  judgements: program → what the images say.

        Errors: InputError when no float32 program is left.
        """
        self._judgements |= judgements
        for program, judgement in judgements.items():
            if judgement.why_not:
                self._why[program] = judgement.why_not
        if not self._floats:
            raise InputError(
                f"{self.base} fails a check: {self._why[self.base]}",
                hint="type gmmvit parity with the same bundle and --data, which says more",
            )

    @property
    def firsts(self) -> list[RunnerName]:
        """The programs to try as the first of a cascade: of each graph that failed the fastest whose float32 program is
        left, at most two.

        A cascade is slower than its first program by the images that float32 computes again, so none is tried where a
        program of the CPU in the same precision passes that is nearly as fast as the first.
        """
        floats, median = self._floats, self._median
        passed = [program for program in self._running if program in self._judgements and program.name in ON_CPUS]
        firsts = [
            program
            for program in self._judgements
            if program in self._why
            and program.name in ON_CPUS
            and program.precision in CASCADES
            and program.stages[1] in floats
            if not any(
                rival.precision == program.precision and median(rival) < _NEARLY * median(program) for rival in passed
            )
            if _MIN_GAIN * median(program) < median(self._rival(program))
        ]
        of_graphs: dict[str, RunnerName] = {}
        for program in sorted(firsts, key=median):
            of_graphs.setdefault(program.arithmetic, program)
        return list(of_graphs.values())[:_CASCADES]

    def add(self, cascades: Mapping[RunnerName, Runner], left_out: Mapping[RunnerName, str]) -> None:
        """Add cascades, but for those whose expected time gains too little."""
        self._opened |= cascades
        self._why |= left_out
        for cascade, runner in cascades.items():
            first, second = map(self._median, cascade.stages)
            deferred = runner.record.chosen.deferred if runner.record is not None else 1.0
            self._expected[cascade] = first + deferred * second
            if _MIN_GAIN * self._expected[cascade] > self._median(self._rival(cascade)):
                self._why[cascade] = f"expected to be less than {_MIN_GAIN:g} times as fast as float32"

    def _median(self, program: RunnerName) -> float:
        """Return the median seconds of a program; of a cascade the expected ones."""
        return self._expected[program] if program.cascade else float(np.median(self._rounds(program)[program]))

    def measure(self, images: Iterable[Batch] = (), *, on_progress: OnProgress = ignore) -> None:
        """Time the programs that are left, for longer, and leave out precisions that are not clearly faster.

        images: batches of the images that judge, on which cascades are timed, again and again if they are few.
        """
        self._time(self._running, on_progress, times=_LONGER)
        if any(program.cascade for program in self._running):
            batches = [batch.inputs for batch in images]
            count = _TIMED_BATCHES[len(batches[0]) > 1]
            self._time_cascades((batches * -(-count // len(batches)))[:count], on_progress)
        for program in self._running:
            rival = self._rival(program)
            if program.cascade and (speed := self._ratio(program, rival).value) < _MIN_GAIN:
                self._why[program] = (
                    f"{speed:.2f} times as fast as {rival} in float32, and a cascade needs at least {_MIN_GAIN:g}"
                )
            elif program.precision != "fp32" and not self._clearly_faster(program, rival):
                self._why[program] = f"not clearly faster than {rival} in float32"
            elif program.name in FLAVORS:
                self._why[program] = "served by gmmvit repository --backend tensorrt --engine DIR"

    def candidates(self) -> tuple[Candidate, ...]:
        """Return all programs: those that passed, the fastest first, then the measured ones, then the others."""
        others = sorted(self._why, key=self._rank)
        return tuple(map(self._candidate, [*self.passed, *others]))

    def _time(self, programs: Iterable[RunnerName], on_progress: OnProgress, *, times: int = 1) -> None:
        """Time programs in turn, of which cascades are left out, and set the base."""
        programs = [program for program in programs if not program.cascade]
        runs = [partial(self._opened[program].run, self._inputs) for program in programs]
        seconds = dict(zip(programs, seconds_in_turn(runs, times=times, on_progress=on_progress), strict=True))
        self._timings.append(seconds)
        self.base = min(self._floats, key=lambda program: float(np.median(seconds[program])))

    def _time_cascades(self, batches: list[NDArray[np.generic]], on_progress: OnProgress) -> None:
        """Time each cascade and its rivals on the batches; a round is one of `_GROUPS` parts of them."""
        parts = [batches[part[0] : part[-1] + 1] for part in np.array_split(range(len(batches)), _GROUPS)]
        for cascade in [program for program in self._running if program.cascade]:
            programs = list(dict.fromkeys([cascade, self._rival(cascade), self.base]))
            rounds: dict[RunnerName, list[float]] = {program: [] for program in programs}
            seconds: list[float] = []  # of each batch, in the cascade
            deferred = 0
            for batch in batches:  # compiles the graph for each number of images that are computed again
                deferred += int(self._opened[cascade].run_all(batch)[DEFERRED].sum())
            for number, part in enumerate(parts):
                on_progress(Progress(f"time {cascade} on images", number, len(parts)))
                for program in programs if number % 2 else reversed(programs):
                    run = self._opened[program].run
                    settle(partial(run, part[0]), UNTIMED_S)
                    of_part = [seconds_of(partial(run, batch)) for batch in part]
                    rounds[program].append(sum(of_part))
                    seconds += of_part if program == cascade else []
            self._of_cascades[cascade] = rounds
            self._on_images[cascade] = OnImages(
                deferred=deferred / sum(map(len, batches)),
                mean=float(np.mean(seconds)),
                p50=nearest_rank(seconds, 0.5),
                p99=nearest_rank(seconds, 0.99) if len(seconds) >= ENOUGH[0.99] else None,
            )

    def _rounds(self, program: RunnerName) -> dict[RunnerName, list[float]]:
        """Return the last measurement that a program was in."""
        if program.cascade:
            return self._of_cascades.get(program, {})
        return next((seconds for seconds in reversed(self._timings) if program in seconds), {})

    def _rival(self, program: RunnerName) -> RunnerName:
        """Return the float32 program that a program must beat: of CPUs the fastest on the CPU, else the base."""
        seconds = self._timings[-1] if program.cascade else self._rounds(program)
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
        on_images = self._on_images.get(program)
        seconds = [on_images.mean] if on_images is not None else self._rounds(program).get(program)
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
            seconds=float(np.median(seconds)) if seconds else None,
            on_images=on_images,
            threshold=runner.record.threshold if runner is not None and runner.record is not None else None,
        )
