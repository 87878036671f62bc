"""Divide the difference of a quantised runner from PyTorch, on real images, into the stages that cause it.

    quantisation   the quantised graph, with every rounding and apart from any runtime, against PyTorch's float64 logits
    runtime        the runtime with its own operators against the quantised graph
    kernels        this project's CPU kernels against the runtime's own operators, in the same runtime and graph

Each stage has a signal-to-noise ratio (`tolerances.signal_to_noise_db`), and the number of images whose decision it
changes. The operators of a server cannot be exchanged: its kernels belong to its stage ``runtime``.

A runtime rounds some values to another step of the grid than the graph, and so differs from it: by up to
1.1 times what quantisation costs (rms) in correct runtimes, and kernels in bfloat16 by 1.2 times, over any 8 images;
single images reach 2.2 times. On `_MIN_IMAGES` or more, a stage may cost up to `_MAX_COST` times as much as
quantisation; kernels, also the noise of bfloat16.

The runtime must also keep the graph's rounding (`RoundingKept`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.inference.labels import LabelSet
from gmmvit_deploy.parity._quantised import RoundingKept, rounding_problem
from gmmvit_deploy.parity._runner_check import CALIBRATED_ON_THESE, Answers, RunnerCheck, RunnerUnderTest
from gmmvit_deploy.parity._verdict import Check, passed_unless, worst_of
from gmmvit_deploy.parity.measures import ErrorMeasure
from gmmvit_deploy.tolerances import roundoff_ratio

_MAX_COST = 1.5
_MIN_IMAGES = 8


def decided(logits: NDArray[Any], label_set: LabelSet) -> NDArray[Any]:
    """Return the class (B, 1), or for each label whether it is given (B, C)."""
    multi = label_set.task == "multi-label"
    decisions: NDArray[Any] = logits >= np.array(label_set.threshold_logits) if multi else logits.argmax(1)[:, None]
    return decisions


@dataclass(slots=True)
class _Stage:
    """The difference between the logits before and after a stage, and the images whose decision changes."""

    error: ErrorMeasure = field(default_factory=ErrorMeasure)
    changed: int = 0


class Stages:
    """label_set: None for features, which decide nothing.  over_images: as in `tolerances.signal_to_noise_db`."""

    def __init__(self, label_set: LabelSet | None, *, over_images: bool) -> None:
        self._label_set, self._over_images = label_set, over_images
        self._stages: dict[str, _Stage] = {}
        self._all, self._features, self._noise = ErrorMeasure(), ErrorMeasure(), ErrorMeasure()
        self._kept = RoundingKept()
        self._images = self._deferred = 0

    def add(self, answers: Answers) -> None:
        """Add the images that can judge the runner, of a batch that has some."""
        new, known, without_kernels = answers.new, answers.known, answers.without_kernels
        logits, exact = answers.comparable[new], known.exact[new]
        self._images += len(logits)
        self._all.add(logits, exact)
        self._noise.add(known.trained[new], exact)
        if answers.features is not None and known.features is not None:
            self._features.add(answers.features[new], known.exact_values()["features"][new])
        if answers.of_graph is None:
            return
        of_graph = answers.of_graph[new]
        if answers.deferred is not None:  # float32 answered the others
            first = ~answers.deferred[new]
            logits, exact, of_graph = logits[first], exact[first], of_graph[first]
            without_kernels = None if without_kernels is None else without_kernels[first]
            self._deferred += int((~first).sum())
            if not first.any():
                return
        of_runtime = logits if without_kernels is None else without_kernels
        self._kept.add(of_runtime, of_graph, exact)
        self._add_to("quantisation", exact, of_graph)
        self._add_to("runtime", of_graph, of_runtime)
        if without_kernels is not None:
            self._add_to("kernels", without_kernels, logits)

    def _add_to(self, name: str, before: NDArray[Any], after: NDArray[Any]) -> None:
        stage = self._stages.setdefault(name, _Stage())
        stage.error.add(after, before)
        if self._label_set is not None:
            lost = ~np.isfinite(after).all(1)
            changed = decided(before, self._label_set) != decided(after, self._label_set)
            stage.changed += int((lost | changed.any(1)).sum())

    @property
    def blamed(self) -> str:
        """The stage that a failed gate is due to: a stage that fails, else quantisation."""
        if not self._stages:
            return "the precision"
        return next((name for name, _ in self._problems()), "quantisation")

    @property
    def of_graph(self) -> float | None:
        """The signal-to-noise ratio of the quantised graph's logits; None without real images."""
        return self._db("quantisation") if self._stages else None

    def _db(self, name: str) -> float:
        return self._stages[name].error.db(over_images=self._over_images)

    def check(self, snr_db: float | None, least_cosine: float | None) -> Check:
        """Judge the stages, and the whole runner by the gates that the user typed, or None."""
        db, cosine = self._all.db(over_images=self._over_images), self._all.errors().cosine
        of = "features" if self._label_set is None else "logits"
        if self._features.errors().rows:
            of, cosine = "features", self._features.errors().cosine
        stages = {
            name: {"db": self._db(name), **({} if self._label_set is None else {"changed": stage.changed})}
            for name, stage in self._stages.items()
        }
        words = [
            f"{name} {numbers['db']:.1f} dB" + (f", {numbers['changed']} decisions" if "changed" in numbers else "")
            for name, numbers in stages.items()
        ]
        reasons = [f"{name}: {why}" for name, why in self._problems()]
        # NaN, of a runner without finite logits, passes no gate.
        if snr_db is not None and not db >= snr_db:
            reasons.append(f"{self.blamed}: {db:.1f} dB, expected at least {snr_db:g} dB")
        if least_cosine is not None and not cosine >= least_cosine:
            reasons.append(f"{self.blamed}: least cosine {cosine:.4f} of the {of}, expected at least {least_cosine:g}")
        if self._deferred:
            words.append(f"{self._deferred:,} images deferred to float32, which has no part in the stages")
        whole = f"{db:.1f} dB{_gate(snr_db)}, least cosine {cosine:.4f}{_gate(least_cosine)} of the {of}"
        details = {"images": self._images, "db": db, "least_cosine": cosine, "cosine_of": of, "stages": stages}
        details |= {"deferred": self._deferred} if self._deferred else {}
        return passed_unless(
            reasons,
            "stages",
            "; ".join([f"{whole}, on {self._images:,} images", *words]),
            rounding_kept=self._kept.share,
            **details,
        )

    def _problems(self) -> list[tuple[str, str]]:
        """Return (stage, what is wrong with it)."""
        if not self._stages:
            return []
        whole = self._stages["quantisation"].error.errors().rms
        problems = []
        for name, stage in list(self._stages.items())[1:]:
            errors, limit = stage.error.errors(), _MAX_COST * whole
            if name == "kernels":
                limit = max(limit, roundoff_ratio("bf16") * self._noise.errors().rms)
            if errors.broken:
                problems.append((name, f"the logits of {errors.broken} of {errors.rows} images are not finite"))
            elif errors.rows < _MIN_IMAGES:
                continue
            elif errors.rms > limit:
                problems.append(
                    (
                        name,
                        f"changes the logits by {errors.rms:.3g} (rms), and quantisation by {whole:.3g}; expected at "
                        f"most {limit:.3g}",
                    )
                )
            elif name == "runtime" and (why := rounding_problem(self._kept.share)):
                problems.append((name, why))
        return problems


def _gate(value: float | None) -> str:
    return "" if value is None else f" (gate {value:g})"


class StagesCheck(RunnerCheck):
    name = "stages"

    def __init__(self, tested: RunnerUnderTest) -> None:
        super().__init__(tested)
        manifest = self.bundle.manifest
        labels, over_images = manifest.label_set if manifest.has_logits else None, manifest.task == "multi-label"
        self._at = {batch: Stages(labels, over_images=over_images) for batch in tested.batches}

    @property
    def must_decide(self) -> bool:
        options = self.run.options
        return self.graph is not None or options.snr_db is not None or options.least_cosine is not None

    def add(self, answers: Answers) -> None:
        if answers.real and answers.new.any():
            self._at[answers.batch].add(answers)

    def blamed(self, batch: int) -> str:
        return self._at[batch].blamed

    @property
    def db_of_graph(self) -> float | None:
        """The quantised graph's signal-to-noise ratio on the data; None without images that can judge it."""
        return self._at[self.tested.batches[0]].of_graph

    def judge(self) -> Check:
        why = self.run.why_no_images
        if self.graph is not None:
            why = f"not judged on images: {why or CALIBRATED_ON_THESE}" if self.db_of_graph is None else ""
        elif not self.must_decide:
            why = f"{self.runner.precision} is not quantised"
        if why:
            return self.not_judged(why)
        options = self.run.options
        checks = {batch: at.check(options.snr_db, options.least_cosine) for batch, at in self._at.items()}
        return worst_of(checks, lambda details: float(details["db"]))
