"""Compare the classes that a runner gives to an image with the classes that PyTorch gives.

t is PyTorch's float64 logits of an input; its float32 logits where only the gate judges (`Known.gate_only`).

    single-label  flip      an input for which the two predicted classes differ
                  margin    t[PyTorch's class] − t[the runner's class] for a flip;
                            largest logit − second largest logit of t for every other input
    multi-label   θ         the threshold of a label as a logit: log(p / (1 − p)) for the probability p
                  crossing  a label whose logit is at or above θ in PyTorch and below θ in the runner, or the reverse
                  margin    |t − θ| for a label; for an input, the smallest margin of its labels

Only real images show decisions: golden and random inputs are not counted.

Each logit of the runner may differ from t by the limit of the numeric check. Two logits that differ by at most twice
the limit can therefore change places: such a flip is within the noise. A crossing is within the noise if its margin is
at most the limit. A flip or a crossing with a larger margin is a wrong prediction.

Quantisation to int8 or fp8 changes decisions. The check then, or if the user typed a gate, compares the share of images
that keep their decision with the gate, as the check ``accuracy`` does: the interval of the share must lie at or above
it. A change is within the noise only if the margin is at most twice the difference of PyTorch's own float32 and
float64 logits of this image (once, for a crossing). A gate that the user typed for another precision holds without
statistics if the logits are within the limit, and the margin of every image is larger than twice its largest error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.inference.labels import LabelSet, distinct_names
from gmmvit_deploy.intervals import share_interval
from gmmvit_deploy.parity._numeric import NumericCheck
from gmmvit_deploy.parity._runner_check import CALIBRATED_ON_THESE, NO_LOGITS, Answers, RunnerCheck, RunnerUnderTest
from gmmvit_deploy.parity._stages import StagesCheck, decided
from gmmvit_deploy.parity._verdict import Check, Verdict, skipped_check, worst_of
from gmmvit_deploy.tolerances import Limit

_MAX_LISTED = 1000
_MAX_TO_DECIDE = 1_000_000


class Decisions:
    """Accumulate predicted classes, with the margin and the largest error of each input.

    broken: the number of images whose logits are not finite, which `kept` counts as changed.
    """

    _limits = 2
    """The largest margin that noise explains, in limits of the numeric check."""

    def __init__(self, labels: Sequence[str]) -> None:
        self._labels = distinct_names(labels)
        self._points = [(np.zeros(0, np.float32), np.zeros(0, np.float32), np.zeros(0, bool))]  # as in `points`
        self._of_flips = [(np.zeros(0), np.zeros(0))]  # the margins, and the margins that noise of float32 explains
        self._flips: list[dict[str, Any]] = []  # the first, as in the details of the check
        self.broken = 0

    def add(self, where: Sequence[str], logits: NDArray[Any], trained: NDArray[Any], exact: NDArray[Any]) -> None:
        """Add finite logits (B, C) of the runner, and PyTorch's in float32 and float64.  where: names of the inputs."""
        pytorch_class, runner_class = trained.argmax(1), logits.argmax(1)
        rows = np.arange(len(logits))
        runner_up = np.partition(exact, -2, axis=1)[:, -2] if exact.shape[1] > 1 else exact[:, 0]
        flipped = pytorch_class != runner_class
        margins = np.where(flipped, exact[rows, pytorch_class] - exact[rows, runner_class], exact.max(1) - runner_up)
        self._points.append((margins.astype(np.float32), _largest_errors(logits, exact), flipped))
        self._of_flips.append((margins[flipped], 2 * np.abs(trained - exact).max(1)[flipped]))
        for row in np.flatnonzero(flipped)[: _MAX_LISTED - len(self._flips)]:
            names = (self._labels[pytorch_class[row]], self._labels[runner_class[row]])
            self._add_flip(where[row], *names, margins[row])

    def _add_flip(self, where: str, pytorch_class: str, runner_class: str, margin: float) -> None:
        """The classes are distinct names; of a crossing, the name of the label, and ``not`` before the name."""
        named = {"where": where, "pytorch_class": pytorch_class, "runner_class": runner_class}
        self._flips.append({**named, "margin": float(margin)})

    def _counted(self, allowed: float | None = None) -> dict[str, Any]:
        """Return the details about flips.  allowed: the largest margin that noise explains; None for float32's."""
        margins, of_float32 = map(np.concatenate, zip(*self._of_flips, strict=True))
        within = margins <= (of_float32 if allowed is None else allowed)
        return {
            "flips_within_noise": int(within.sum()),
            "flips_wrong": int((~within).sum()),
            "flips": [{**flip, "within_noise": bool(noise)} for flip, noise in zip(self._flips, within, strict=False)],
            "flips_not_listed": len(within) - len(self._flips),
        }

    def kept(self, gate: float, *, blamed: str) -> Check:
        """Judge the share of real images that keep their decision.  blamed: what changes the decisions."""
        _, _, changed = self.points()
        broken = self.broken
        count, lost = len(changed) + broken, int(changed.sum()) + broken
        if not count:
            return skipped_check("decisions", CALIBRATED_ON_THESE)
        low, high = share_interval(count - lost, count)
        verdict: Verdict = "passed" if low >= gate else "failed" if high < gate else "undecided"
        counted = self._counted()
        summary = (
            f"the same decision on {(count - lost) / count:.2%} ({low:.2%} to {high:.2%}) of {count:,} images, gate "
            f"{gate:.2%}"
        )
        if flips := counted["flips_within_noise"] + counted["flips_wrong"]:
            summary += f"; {counted['flips_within_noise']} of {flips} changes within the noise of float32"
        changes = f"{lost:,} of {count:,} images changed" + (f", {broken:,} of them to NaN" if broken else "")
        needed = _images_to_decide(lost / count, gate) if verdict == "undecided" else None
        reason = {
            "failed": f"{blamed} changes too many decisions: {changes}",
            "undecided": f"too few images to decide: {changes}; "
            f"{f'{needed:,}' if needed else f'more than {_MAX_TO_DECIDE:,}'} images with the same share would decide",
        }
        return Check(
            name="decisions",
            verdict=verdict,
            summary=summary,
            reasons=(reason[verdict],) if verdict in reason else (),
            details={
                "inputs": count,
                "agreement": (count - lost) / count,
                "interval": [low, high],
                "gate": gate,
                "images_needed": needed,
                **counted,
            },
        )

    @property
    def steady(self) -> bool:
        """True if no predicted class changed, and the error of no image is large enough to change it."""
        margins, errors, changed = self.points()
        return not (self.broken or changed.any() or (self._limits * errors >= margins).any())

    def points(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Return three arrays (N,) over all inputs: the margins, the largest errors, and True for a changed class."""
        margins, errors, changed = map(np.concatenate, zip(*self._points, strict=True))
        return margins, errors, changed

    def check(self, limit: Limit) -> Check:
        """Fail if noise does not explain the margin of a flip.  limit: of the numeric check."""
        margins, errors, changed = self.points()
        threshold = self._limits * limit.largest
        counted = self._counted(threshold)
        count, same, wrong = len(changed), int((~changed).sum()), counted["flips_wrong"]
        reasons = [self._reason(flip, threshold) for flip in counted["flips"] if not flip["within_noise"]]
        steady = ~changed & (margins > 0)
        return Check(
            name="decisions",
            verdict="failed" if wrong or not count else "passed",
            summary=self._summary(same, count, counted["flips_within_noise"], wrong),
            reasons=tuple(reasons)
            if count
            else ("no row of the runner's logits is finite and has the expected shape",),
            details={
                "inputs": count,
                "agreement": same / count if count else 0.0,
                "noise_margin": threshold,
                "smallest_margin": float(margins.min()) if count else None,
                # At 1 or above, a flip is possible.
                "nearest_to_flipping": float((self._limits * errors[steady] / margins[steady]).max())
                if steady.any()
                else None,
                **counted,
            },
        )

    def _summary(self, same: int, count: int, within_noise: int, wrong: int) -> str:
        flips = f"; {within_noise} prediction changes within the noise, {wrong} wrong" if within_noise or wrong else ""
        return f"the same class on {same:,} of {count:,} inputs{flips}"

    def _reason(self, flip: dict[str, Any], threshold: float) -> str:
        return (
            f"{flip['where']}: PyTorch predicts {flip['pytorch_class']}, the runner {flip['runner_class']}; "
            f"the margin is {flip['margin']:.3g}, but noise explains at most {threshold:.3g}"
        )


class Crossings(Decisions):
    """Accumulate the labels of each input of a multi-label network."""

    _limits = 1

    def __init__(self, label_set: LabelSet) -> None:
        super().__init__(label_set.labels)
        self._label_set = label_set
        self._thresholds = np.array(label_set.threshold_logits)

    def add(self, where: Sequence[str], logits: NDArray[Any], trained: NDArray[Any], exact: NDArray[Any]) -> None:
        there = decided(trained, self._label_set)
        crossed = there != decided(logits, self._label_set)
        margins = np.abs(exact - self._thresholds)
        self._points.append((margins.min(1).astype(np.float32), _largest_errors(logits, exact), crossed.any(1)))
        self._of_flips.append((margins[crossed], np.abs(trained - exact)[crossed]))
        for row, label in np.argwhere(crossed)[: _MAX_LISTED - len(self._flips)]:
            names = (self._labels[label], f"not {self._labels[label]}")
            ours, theirs = names if there[row, label] else names[::-1]
            self._add_flip(where[row], ours, theirs, margins[row, label])

    def _summary(self, same: int, count: int, within_noise: int, wrong: int) -> str:
        crossings = f"; {within_noise} labels crossed their threshold within the noise, {wrong} wrongly"
        return f"the same labels on {same:,} of {count:,} inputs{crossings if within_noise or wrong else ''}"

    def _reason(self, flip: dict[str, Any], threshold: float) -> str:
        return (
            f"{flip['where']}: PyTorch: {flip['pytorch_class']}, the runner: {flip['runner_class']}; the logit is "
            f"{flip['margin']:.3g} from the threshold, but noise explains at most {threshold:.3g}"
        )


class DecisionsCheck(RunnerCheck):
    name = "decisions"
    of_gate = True

    def __init__(self, tested: RunnerUnderTest) -> None:
        super().__init__(tested)
        labels = self.bundle.manifest.label_set
        self._at = {
            batch: Crossings(labels) if labels.task == "multi-label" else Decisions(labels.labels)
            for batch in tested.batches
        }

    @property
    def must_decide(self) -> bool:
        return self.run.options.keep_decisions is not None

    def add(self, answers: Answers) -> None:
        if not answers.real or not self.bundle.manifest.has_logits:
            return
        at, known, logits = self._at[answers.batch], answers.known, answers.comparable
        finite = np.isfinite(logits).all(1)
        at.broken += int((answers.new & ~finite).sum())
        judged = answers.new & finite
        where = list(compress(known.batch.where, judged))
        exact = known.trained if known.gate_only and self.graph is not None else known.exact
        at.add(where, logits[judged], known.trained[judged], exact[judged])

    def judge(self) -> Check:
        if why := self.run.why_no_images if self.bundle.manifest.has_logits else NO_LOGITS:
            return self.not_judged(why)
        gate = self.run.options.keep_decisions or self.runner.kept_gate
        numeric = self.tested.check(NumericCheck)
        by_margins = (
            self.graph is None
            and self.runner.record is None
            and numeric.within_limits
            and all(at.steady for at in self._at.values())
        )
        if gate == 1 or by_margins:
            checks = {batch: at.check(numeric.widest_limit) for batch, at in self._at.items()}
        else:
            stages = self.tested.check(StagesCheck)
            checks = {batch: at.kept(gate, blamed=stages.blamed(batch)) for batch, at in self._at.items()}
        check = worst_of(checks, lambda details: float(details["agreement"]))
        return replace(check, details={**check.details, "by_margins": by_margins}) if check.details else check

    def points(self, batch: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Return the points of the runner in batches of a size, as in `Decisions.points`."""
        return self._at[batch].points()


def _largest_errors(logits: NDArray[Any], exact: NDArray[Any]) -> NDArray[Any]:
    errors: NDArray[Any] = np.abs(logits - exact).max(1).astype(np.float32)
    return errors


def _images_to_decide(changed: float, gate: float) -> int | None:
    """Return about the smallest number of images that decides a gate, or None above `_MAX_TO_DECIDE`."""
    images = 8.0
    while images < _MAX_TO_DECIDE:
        count = math.ceil(images)
        low, high = share_interval(count - round(changed * count), count)
        if low >= gate or high < gate:
            return count
        images *= 1.05
    return None
