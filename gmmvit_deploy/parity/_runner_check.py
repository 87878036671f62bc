"""What a check of a runner is: a class that collects the runner's answers to all inputs, then judges them.

A new check is a module with a subclass of `RunnerCheck`, and a line in `parity.check.CHECKS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.inference import DEFERRED
from gmmvit_deploy.inference.precision import QUANTIZED, Form, Precision
from gmmvit_deploy.parity._quantised import QuantisedGraph
from gmmvit_deploy.parity._trained_accuracy import TrainedAccuracy
from gmmvit_deploy.parity._verdict import Check, skipped_check
from gmmvit_deploy.parity.inputs import ImageStream
from gmmvit_deploy.parity.options import ParityOptions
from gmmvit_deploy.parity.reference import Known, Reference
from gmmvit_deploy.progress import OnProgress, prefixed
from gmmvit_deploy.runtimes.programs.image_batches import image_hashes
from gmmvit_deploy.runtimes.runners.open import open_runner
from gmmvit_deploy.runtimes.runners.runner import Runner

NO_LOGITS = "the bundle has no logits; the checks numeric and neighbours judge its features"
CALIBRATED_ON_THESE = "the graph was calibrated on these images, so they cannot judge it; add others to --data"

_Check = TypeVar("_Check", bound="RunnerCheck")


@dataclass(kw_only=True, eq=False)
class ParityRun:
    """What the checks of all runners share.

    reference: None if this process cannot build the model.  why_no_model: the reason.
    trained: PyTorch's own accuracy on the data.  kept: name → golden and random inputs.
    stream: the images of the data, all read; None without images.
    """

    options: ParityOptions
    reference: Reference | None
    why_no_model: str
    trained: TrainedAccuracy
    on_progress: OnProgress
    kept: dict[str, Known] = field(default_factory=dict)
    stream: ImageStream | None = None
    _graphs: dict[tuple[Path, Precision, Form], QuantisedGraph] = field(default_factory=dict)

    @property
    def needs_model(self) -> str:
        """Why a check that needs the model in PyTorch does not run."""
        return f"needs the model in PyTorch: {self.why_no_model}"

    @property
    def why_no_images(self) -> str:
        """Why there are no real images with PyTorch's logits; empty if there are some."""
        if self.reference is None:
            return f"needs PyTorch's logits of further images: {self.why_no_model}"
        return "" if self.options.data is not None else "only real images show decisions; type --data folder:VAL"

    @property
    def sent(self) -> Known:
        """The set of ``kept`` that checks send to the runner in further batches."""
        return list(self.kept.values())[-1]

    def graph_of(self, runner: Runner) -> QuantisedGraph | None:
        """Return the runner's quantised graph, which runners share; None for other precisions."""
        if runner.precision not in QUANTIZED:
            return None
        key = (runner.bundle.path, runner.precision, runner.form)
        if key not in self._graphs:
            self._graphs[key] = QuantisedGraph(runner.bundle, runner.precision, runner.form)
        return self._graphs[key]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answers:
    """What a runner answered to a batch of inputs.

    inputs: the name of the set of inputs.  real: True for images of the data.  batch: the size of the runner's batches.
    logits: (B, C), in the shape that the runner gave.  features: (B, D); None if the bundle has none beside logits.
    new: (B,), which images did not calibrate the runner's quantised graph, and so can judge it.
    of_graph: (B, C), the logits of the quantised graph with every rounding, of a cascade those of the first program;
    None for other precisions, and where only the gate judges.
    without_kernels: the logits of the new images in the same runtime without our kernels; None without kernels, and
    where only the gate judges.
    deferred: (B,), the images that a cascade computed again in float32; None for another runner.
    """

    inputs: str
    real: bool
    known: Known
    batch: int
    logits: NDArray[Any]
    features: NDArray[Any] | None
    new: NDArray[Any]
    of_graph: NDArray[Any] | None
    without_kernels: NDArray[Any] | None
    deferred: NDArray[Any] | None

    @property
    def comparable(self) -> NDArray[Any]:
        """The logits in the shape of PyTorch's (B, C); NaN if the runner's have another shape."""
        shape = self.known.trained.shape
        return self.logits if self.logits.shape == shape else np.full(shape, np.nan, np.float32)


class RunnerUnderTest:
    """A runner with its checks; it computes all inputs in batches of each size of ``batches``.

    Kernels, and what a runtime makes of a graph, depend on the size: so the worst result of a check counts.
    graph: the quantised graph of the runner; None for other precisions.
    """

    def __init__(self, runner: Runner, run: ParityRun, checks: Iterable[type[RunnerCheck]]) -> None:
        self.runner, self.run, self.graph = runner, run, run.graph_of(runner)
        smallest = min(low for low, _ in runner.ranges)
        self.batches = tuple(sorted({smallest, max(smallest, min(run.options.batch, runner.max_batch))}))
        self.on_progress = prefixed(runner.name, run.on_progress)
        self._plain: Runner | None = None  # the runner without kernels
        self.checks = tuple(check(self) for check in checks)

    def check(self, kind: type[_Check]) -> _Check:
        return next(check for check in self.checks if isinstance(check, kind))

    def add(self, inputs: str, known: Known, *, real: bool) -> None:
        """Compute a batch, and give the answers to every check that takes them."""
        if known.gate_only and self.runner.precision == "fp32":  # no gate judges it
            return
        images, gate_only = known.batch.inputs, known.gate_only and self.graph is not None
        of_graph = self.graph.logits(images, real=real) if self.graph is not None and not gate_only else None
        new = self._new(images)
        without_kernels = self._without_kernels(images[new]) if real and new.any() and not gate_only else None
        for batch in self.batches:
            outputs = self.runner.rows_all(images, batch=batch)
            answers = Answers(
                inputs=inputs,
                real=real,
                known=known,
                batch=batch,
                logits=outputs[self.runner.outputs[0]],
                features=outputs.get("features") if known.features is not None else None,
                new=new,
                of_graph=of_graph,
                without_kernels=without_kernels,
                deferred=outputs[DEFERRED][:, 0] if self.runner.record is not None else None,
            )
            for check in self.checks:
                if check.of_gate or not gate_only:
                    check.add(answers)

    def _new(self, images: NDArray[Any]) -> NDArray[Any]:
        """Return which images chose neither ranges nor a threshold of the runner."""
        new = np.ones(len(images), bool) if self.graph is None else self.graph.new(images)
        if self.runner.record is not None:
            new &= ~np.isin(image_hashes(images), self.runner.record.image_sha256)
        return new

    def _without_kernels(self, inputs: NDArray[Any]) -> NDArray[Any] | None:
        runner = self.runner
        if self.graph is None or not runner.runner_name.kernels:
            return None
        if self._plain is None:
            self._plain = open_runner(replace(runner.runner_name, kernels=False, cascade=False), runner.bundle)
            self._plain.judged = True
        return self._plain.rows(inputs)

    def close(self) -> None:
        if self._plain is not None:
            self._plain.close()


class RunnerCheck(ABC):
    """A check of a runner."""

    name: ClassVar[str]
    of_gate: ClassVar[bool] = False
    """Whether the check judges a share of the images, and so takes those of `Known.gate_only` too."""

    def __init__(self, tested: RunnerUnderTest) -> None:
        self.tested, self.run = tested, tested.run
        self.runner, self.bundle, self.graph = tested.runner, tested.runner.bundle, tested.graph

    @property
    def must_decide(self) -> bool:
        """True if a check that cannot judge is undecided, as where the user typed its gate, and not skipped."""
        return False

    def add(self, answers: Answers) -> None:  # noqa: B027  # many checks need no answers
        """Add the answers to a batch of inputs, in batches of one size."""

    @abstractmethod
    def judge(self) -> Check:
        """Judge all answers.  A check that does not apply returns `not_judged`, with the reason."""

    def not_judged(self, why: str) -> Check:
        if self.must_decide:
            return Check(name=self.name, verdict="undecided", summary=why, reasons=(why,))
        return skipped_check(self.name, why)
