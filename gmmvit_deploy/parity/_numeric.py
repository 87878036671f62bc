"""Measure the distance of a runner's logits from PyTorch's logits, and compare the distance with a limit.

For each set of inputs, the check measures two distances of the runner's logits: from PyTorch's float64 logits, and from
PyTorch's float32 logits. The limit applies to the first distance. For fp32, fp16 and bf16, the limit is derived from
the noise, which is the distance of PyTorch's float32 logits from PyTorch's float64 logits.

For int8 and fp8, the first distance is that from the logits of the quantised graph itself, computed with every rounding
of the graph: it shows what the runtime does, and not what quantisation costs, which the checks ``decisions``,
``accuracy`` and ``calibration`` judge on real images. The limit is derived from the distance of the graph's logits from
PyTorch's that `gmmvit convert` recorded (module `tolerances`): a value that a runtime rounds to the next step of the
grid changes later ones, so runtimes differ by about as much as quantisation costs. The limit also applies to the
distance from PyTorch's logits, which a graph that is not the recorded one exceeds. And the runner must keep the graph's
rounding, which a runner that computes in float32 does not.

The logits that a cascade computes again have the limit of float32; the others, that of the first program.

If PyTorch's logits are equal for all inputs, as before training with a zero classifier head, a wrong runner can give
the same logits: the check then fails, because it proves nothing.

A separate check, ``reference``, compares PyTorch's logits of the golden inputs on this machine with the logits that
PyTorch computed at export.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.bundle.variants import recorded_distances
from gmmvit_deploy.inference.precision import Precision
from gmmvit_deploy.parity._quantised import GRAPH, RoundingKept, rounding_problem
from gmmvit_deploy.parity._runner_check import Answers, RunnerCheck, RunnerUnderTest
from gmmvit_deploy.parity._verdict import Check, passed_unless
from gmmvit_deploy.parity.measures import ErrorMeasure, Errors, distance
from gmmvit_deploy.parity.report import shown_inputs
from gmmvit_deploy.parity.suspects import explain
from gmmvit_deploy.tolerances import Limit, Noise, limit_from_noise, limit_from_stored

AGAIN = ", computed again in float32"
EXACT = "PyTorch's float64 logits"
STORED = "the logits that PyTorch computed at export"


@dataclass(frozen=True, slots=True, kw_only=True)
class SetNumbers:
    """The measured distances of a set of inputs, and their limit.

    batch: the number of inputs in the runner's batches.
    from_exact, limit: the distances of the runner's logits from those that ``reference`` names, and their limit.
    from_trained: the distances of the runner's logits from PyTorch's float32 logits.
    misshapen: expected and actual shape of the runner's logits if they differ; else empty.
    spread: the largest difference of PyTorch's float64 logits of a class between two inputs of the set.
    rounding_kept: the share of a quantised graph's rounding in the runner's logits (`parity._quantised`).
    """

    inputs: str
    batch: int
    noise: Noise
    limit: Limit
    from_exact: Errors
    from_trained: Errors
    misshapen: str
    spread: float
    reference: str
    rounding_kept: float | None

    @property
    def equal(self) -> bool:
        """Whether the logits of all inputs are equal within the limit for fp32."""
        return self.spread <= limit_from_noise(self.noise).largest

    def problems(self) -> list[str]:
        shown = f"{shown_inputs(self.inputs)}, batch {self.batch}"
        if self.misshapen:
            return [f"{shown}: {self.misshapen}"]
        errors = self.from_exact
        if errors.broken:
            return [f"{shown}: the logits of {errors.broken} of {errors.rows} inputs are not finite"]
        if not self.noise.usable:
            return [
                f"{shown}: PyTorch's own float32 logits differ by up to {self.noise.largest:.3g} from float64, "
                f"at logits of up to {self.noise.scale:.3g}: float32 is too coarse for this model, "
                "so the runner cannot be judged"
            ]
        problems = []
        if not errors.largest <= self.limit.largest:
            problems.append(
                f"{shown}: logits differ by up to {errors.largest:.3g} from {self.reference}; "
                f"expected at most {self.limit.largest:.3g}; derivation: {self.limit.derivation}"
            )
        elif self.limit.rms is not None and not errors.rms <= self.limit.rms:
            problems.append(
                f"{shown}: logits differ by {errors.rms:.3g} (rms) from {self.reference}; "
                f"expected an rms of at most {self.limit.rms:.3g}; derivation: {self.limit.derivation}"
            )
        elif self.reference == GRAPH and not self.from_trained.largest <= self.limit.largest:
            problems.append(
                f"{shown}: logits differ by up to {self.from_trained.largest:.3g} from PyTorch's; expected at most "
                f"{self.limit.largest:.3g}; derivation: {self.limit.derivation}"
            )
        elif why := rounding_problem(self.rounding_kept):
            problems.append(f"{shown}: {why}")
        return problems


class Distances:
    """stored: the noise recorded at export, if both of PyTorch's logits are those stored at export; else None."""

    def __init__(self, inputs: str, *, batch: int, stored: Noise | None = None) -> None:
        self.inputs, self.batch, self._stored = inputs, batch, stored
        self._reference = EXACT if stored is None else STORED
        self._noise, self._exact, self._trained = ErrorMeasure(), ErrorMeasure(), ErrorMeasure()
        self._kept = RoundingKept()
        self._misshapen = ""
        self._lowest: NDArray[Any] | float = np.inf
        self._highest: NDArray[Any] | float = -np.inf

    def add(
        self,
        logits: NDArray[Any],
        trained: NDArray[Any],
        exact: NDArray[Any],
        of_graph: NDArray[Any] | None = None,
    ) -> None:
        """Add logits (B, C) of the runner (any shape), of PyTorch in float32 and float64, and of a quantised graph."""
        self._noise.add(trained, exact)
        self._lowest, self._highest = np.fmin(self._lowest, exact.min(0)), np.fmax(self._highest, exact.max(0))
        if logits.shape != exact.shape:
            self._misshapen = f"expected logits {exact.shape}, got {logits.shape}"
            return
        if of_graph is not None:
            self._reference = GRAPH
            self._kept.add(logits, of_graph, exact)
        self._exact.add(logits, exact if of_graph is None else of_graph)
        self._trained.add(logits, trained)

    def numbers(self, precision: Precision, recorded: float | None) -> SetNumbers:
        noise = self._noise.noise() if self._stored is None else self._stored
        limit = limit_from_noise if self._stored is None else limit_from_stored
        return SetNumbers(
            inputs=self.inputs,
            batch=self.batch,
            noise=noise,
            limit=limit(noise, precision, recorded=recorded),
            from_exact=self._exact.errors(),
            from_trained=self._trained.errors(),
            misshapen=self._misshapen,
            spread=float(np.max(self._highest - self._lowest)),
            reference=self._reference,
            rounding_kept=self._kept.share,
        )


class NumericCheck(RunnerCheck):
    """Fails if a set of inputs has a problem, or if PyTorch's logits are equal in every set."""

    name = "numeric"

    def __init__(self, tested: RunnerUnderTest) -> None:
        super().__init__(tested)
        self._recorded = recorded_distances(self.bundle, self.runner.precision, self.runner.form)
        self._logits: dict[int, dict[str, Distances]] = {batch: {} for batch in tested.batches}
        self._features: dict[int, dict[str, Distances]] = {batch: {} for batch in tested.batches}
        self._kept_logits: list[NDArray[Any]] = []
        self._kept_features: list[NDArray[Any]] = []

    def add(self, answers: Answers) -> None:
        name, batch, known = answers.inputs, answers.batch, answers.known
        noise = self.bundle.stored_noise(known.exact) if self.run.reference is None else None
        for stage, rows in _stages(answers).items():
            distances = self._logits[batch].setdefault(name + stage, Distances(name + stage, batch=batch, stored=noise))
            of_graph = answers.of_graph[rows] if answers.of_graph is not None and not stage else None
            distances.add(answers.logits[rows], known.trained[rows], known.exact[rows], of_graph)
            if known.features is not None and answers.features is not None:
                shown = Distances(f"{name}, features{stage}", batch=batch)
                distances = self._features[batch].setdefault(name + stage, shown)
                distances.add(answers.features[rows], known.features[rows], known.exact_values()["features"][rows])
        if not answers.real and batch == self.tested.batches[-1]:
            self._kept_logits.append(answers.comparable)
            if answers.features is not None:
                self._kept_features.append(answers.features)

    def _numbers(self, of_batches: dict[int, dict[str, Distances]], key: str) -> list[SetNumbers]:
        """key: of the distance that conversion recorded; the data has the distance of the golden inputs."""
        return [
            distances.numbers("fp32", None)
            if name.endswith(AGAIN)
            else distances.numbers(
                self.runner.precision, self._recorded.get(f"random_{key}" if name == "random" else key)
            )
            for of_batch in of_batches.values()
            for name, distances in of_batch.items()
        ]

    @cached_property
    def _of_logits(self) -> list[SetNumbers]:
        return self._numbers(self._logits, "largest_abs")

    @property
    def kept_limit(self) -> Limit:
        """The limit for the inputs that are sent in further batches."""
        sent = list(self.run.kept)[-1]
        return next(numbers.limit for numbers in self._of_logits if numbers.inputs.removesuffix(AGAIN) == sent)

    @property
    def widest_limit(self) -> Limit:
        return max((numbers.limit for numbers in self._of_logits), key=lambda limit: limit.largest)

    def _judged(self, sets: list[SetNumbers]) -> list[SetNumbers]:
        """Leave out the data for a quantised graph, which other checks judge on images."""
        return [
            numbers
            for numbers in sets
            if self.graph is None or numbers.inputs.split(",")[0] in self.run.kept or numbers.inputs.endswith(AGAIN)
        ]

    @cached_property
    def _of_features(self) -> list[SetNumbers]:
        return self._numbers(self._features, "features_largest_abs")

    @cached_property
    def _sets(self) -> list[SetNumbers]:
        return self._judged([*self._of_logits, *self._of_features])

    @property
    def within_limits(self) -> bool:
        return not any(numbers.problems() for numbers in self._sets)

    def judge(self) -> Check:
        logits, sets = self._judged(self._of_logits), self._sets
        reasons = [problem for numbers in sets for problem in numbers.problems()]
        cause = self._likely_cause() if reasons else []
        if all(numbers.equal for numbers in logits):
            spread = max(numbers.spread for numbers in logits)
            reasons.append(
                f"PyTorch's logits are equal for all inputs: they differ by at most {spread:.3g} between inputs, so "
                "that the check proves nothing; the weights of a classifier head are often zero before training"
            )
        reasons += cause
        whole = [numbers for numbers in sets if not np.isnan(numbers.from_exact.largest)]
        summary = "no comparable logits"
        if whole:
            worst = max(whole, key=lambda numbers: numbers.from_exact.largest / numbers.limit.largest)
            errors = worst.from_exact
            summary = (
                f"{shown_inputs(worst.inputs)}, batch {worst.batch}: at most {errors.largest:.2g} from "
                f"{worst.reference} (99 %: {errors.p99:.2g}, relative L2 {errors.relative_l2:.1g}), "
                f"limit {worst.limit.largest:.2g}"
            )
        return passed_unless(reasons, self.name, summary, sets=[asdict(numbers) for numbers in sets])

    def _likely_cause(self) -> list[str]:
        """Return the mistake with which PyTorch gives the runner's logits, if there is one.

        Where only the features differ, the mistake with which PyTorch gives these.
        """
        if self.run.reference is None:
            return []
        inputs = np.concatenate([known.batch.inputs for known in self.run.kept.values()])
        reference, kept, limit, of = self.run.reference, self._kept_logits, self.kept_limit.largest, "logits"
        labels = self.bundle.manifest.labels
        if not any(numbers.problems() for numbers in self._of_logits):
            reference, kept, of, labels = reference.of_features(), self._kept_features, "features", ()
            limit = max(numbers.limit.largest for numbers in self._of_features)
        guess = explain(self.bundle, reference, inputs, np.concatenate(kept), limit, labels=labels)
        return [f"likely cause: {guess}; with this mistake, PyTorch gives the {of} of the runner"] if guess else []


def _stages(answers: Answers) -> dict[str, Any]:
    """Return what follows the name of the inputs → the rows: all, or those of each program of a cascade."""
    if answers.deferred is None:
        return {"": slice(None)}
    stages = {"": ~answers.deferred, AGAIN: answers.deferred}
    return {stage: rows for stage, rows in stages.items() if rows.any()}


def check_stored(stored: NDArray[Any], trained: NDArray[Any], exact: NDArray[Any]) -> Check:
    """Compare PyTorch's float32 logits here (``exact``: in float64) with those stored at export, all (B, C)."""
    noise = ErrorMeasure()
    noise.add(trained, exact)
    largest = distance(stored, trained)
    limit = limit_from_noise(noise.noise()).largest
    reason = (
        f"PyTorch's logits here differ by {largest:.3g} from PyTorch's logits at export; expected at most {limit:.3g}"
    )
    summary = f"PyTorch's logits here differ by at most {largest:.2g} from its logits at export (limit {limit:.2g})"
    reasons = [] if largest <= limit else [reason]  # NaN exceeds it
    return passed_unless(reasons, "reference", summary, largest=largest, limit=limit)
