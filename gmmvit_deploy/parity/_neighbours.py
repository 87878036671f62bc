"""Compare a search by the runner's features with a search by PyTorch's: the share of nearest neighbours that is kept.

`neighbours` defines the share and its interval. The check judges networks without logits, which decide nothing, in
every precision but float32, and every runner for which the user typed a gate. Images that calibrated the graph do not
count. Of more images than `_MAX_IMAGES`, every second, fourth, … is kept, so that memory holds no more features.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.neighbours import KEEP_NEIGHBOURS, MIN_IMAGES, NEIGHBOURS, kept_neighbours
from gmmvit_deploy.parity._runner_check import Answers, RunnerCheck, RunnerUnderTest
from gmmvit_deploy.parity._verdict import Check, Verdict, worst_of

_MAX_IMAGES = 10_000


class _Features:
    """The features of the runner and of PyTorch in float32, both (N, D)."""

    def __init__(self) -> None:
        self._pairs: list[tuple[NDArray[Any], NDArray[Any]]] = []
        self._seen, self._step = 0, 1

    def add(self, features: NDArray[Any], reference: NDArray[Any]) -> None:
        for ours, theirs in zip(features, reference, strict=True):
            if self._seen % self._step == 0:
                self._pairs.append((ours.copy(), theirs.copy()))  # a view would keep the batch
            self._seen += 1
        if len(self._pairs) > _MAX_IMAGES:
            self._pairs, self._step = self._pairs[::2], 2 * self._step

    @property
    def count(self) -> int:
        return len(self._pairs)

    def check(self, gate: float, *, blamed: str) -> Check:
        try:
            kept = kept_neighbours(*(np.stack(each) for each in zip(*self._pairs, strict=True)))
        except ValueError as exc:
            return Check(name=NeighboursCheck.name, verdict="undecided", summary=str(exc), reasons=(str(exc),))
        verdict: Verdict = "passed" if kept.low >= gate else "failed" if kept.high < gate else "undecided"
        reason = {
            "failed": f"{blamed} changes too many neighbours",
            "undecided": f"too few images to decide: {self.count:,}; the interval contains the gate",
        }
        return Check(
            name=NeighboursCheck.name,
            verdict=verdict,
            summary=f"{kept.value:.2%} ({kept.low:.2%} to {kept.high:.2%}) of the {NEIGHBOURS} nearest neighbours of "
            f"{self.count:,} images are PyTorch's, gate {gate:.2%}",
            reasons=(reason[verdict],) if verdict in reason else (),
            details={
                "images": self.count,
                "kept": kept.value,
                "interval": [kept.low, kept.high],
                "gate": gate,
            },
        )


class NeighboursCheck(RunnerCheck):
    name = "neighbours"
    of_gate = True

    def __init__(self, tested: RunnerUnderTest) -> None:
        super().__init__(tested)
        self._at = {batch: _Features() for batch in tested.batches}

    @property
    def must_decide(self) -> bool:
        return self.run.options.keep_neighbours is not None or (self.graph is not None and self._applies)

    @property
    def _applies(self) -> bool:
        alone = not self.bundle.manifest.has_logits and self.runner.precision != "fp32"
        return alone or self.run.options.keep_neighbours is not None

    def add(self, answers: Answers) -> None:
        if not answers.real or not self._applies:
            return
        known, new = answers.known, answers.new
        if not self.bundle.manifest.has_logits:
            self._at[answers.batch].add(answers.comparable[new], known.trained[new])
        elif answers.features is not None and known.features is not None:
            self._at[answers.batch].add(answers.features[new], known.features[new])

    def judge(self) -> Check:
        if "features" not in self.bundle.manifest.output_names:
            return self.not_judged("the bundle has no features; type gmmvit export --outputs features or both")
        if why := self.run.why_no_images:
            return self.not_judged(why)
        if not self._applies:
            return self.not_judged("float32 is held to the noise by the check numeric, and logits to their decisions")
        if (count := min(at.count for at in self._at.values())) < MIN_IMAGES:
            return self.not_judged(f"too few images to decide: {count}, expected at least {MIN_IMAGES}")
        gate = self.run.options.keep_neighbours or KEEP_NEIGHBOURS
        blamed = "the precision" if self.graph is None else "quantisation"
        checks = {batch: at.check(gate, blamed=blamed) for batch, at in self._at.items()}
        return worst_of(checks, lambda details: float(details["kept"]))
