"""Compare the labels that a runner gives to an image with the labels that PyTorch gives, for a multi-label network.

    θ         the threshold of a label as a logit: log(p / (1 − p)) for the probability p
    crossing  a label whose logit is at or above θ in PyTorch and below θ in the runner, or the reverse
    margin    |t − θ|, with t PyTorch's float64 logit of the label

Each logit of the runner may differ from t by the limit of the numeric check, so a crossing with a margin of at most the
limit is within the noise. A crossing with a larger margin is a wrong label.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.images.labels import LabelSet
from gmmvit_deploy.parity.decisions import MOST_LISTED, Decisions, Flip
from gmmvit_deploy.parity.verdict import Check
from gmmvit_deploy.tolerances import Limit

__all__ = ["Crossings", "decisions_of"]


def decisions_of(label_set: LabelSet) -> Decisions | Crossings:
    """Return what collects the decisions of a network with these labels."""
    return Crossings(label_set) if label_set.task == "multi-label" else Decisions(label_set.labels)


class Crossings:
    """Accumulate the labels of each input batch by batch.  The methods are those of `Decisions`."""

    def __init__(self, label_set: LabelSet) -> None:
        self._names = label_set.names
        self._thresholds = np.array(label_set.threshold_logits)
        self._margins: list[NDArray[Any]] = []
        self._errors: list[NDArray[Any]] = []
        self._crossed: list[NDArray[Any]] = []
        self._crossings: list[tuple[str, int, bool, float]] = []
        self._beyond: list[NDArray[Any]] = []

    def add(self, where: Sequence[str], logits: NDArray[Any], trained: NDArray[Any], exact: NDArray[Any]) -> None:
        """Add a batch.

        where: a text that identifies each input.  logits: (B, C), the finite logits of the runner.
        trained, exact: (B, C), PyTorch's float32 and float64 logits.
        """
        there = trained >= self._thresholds
        crossed = there != (logits >= self._thresholds)
        margins = np.abs(exact - self._thresholds)
        self._margins.append(margins.min(1).astype(np.float32))
        self._errors.append(np.abs(logits - exact).max(1).astype(np.float32))
        self._crossed.append(crossed.any(1))
        self._beyond.append(margins[crossed])
        for row, label in np.argwhere(crossed)[: MOST_LISTED - len(self._crossings)]:
            self._crossings.append((where[row], int(label), bool(there[row, label]), float(margins[row, label])))

    def points(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Return three arrays (N,): the smallest margin of a label, the largest error, and True with a crossing."""
        if not self._margins:
            return np.zeros(0, np.float32), np.zeros(0, np.float32), np.zeros(0, bool)
        return np.concatenate(self._margins), np.concatenate(self._errors), np.concatenate(self._crossed)

    def check(self, limit: Limit) -> Check:
        """Fail if the margin of a crossing is larger than the limit, or if no logits could be compared.

        limit: the limit of the numeric check.
        """
        margins, errors, crossed = self.points()
        beyond = np.concatenate(self._beyond) if self._beyond else np.zeros(0)
        wrong = int((beyond > limit.largest).sum())
        flips = [
            Flip(
                where=where,
                pytorch_class=self._names[label] if there else f"not {self._names[label]}",
                runner_class=f"not {self._names[label]}" if there else self._names[label],
                margin=margin,
                within_noise=margin <= limit.largest,
            )
            for where, label, there, margin in self._crossings
        ]
        same = int((~crossed).sum())
        summary = f"the same labels on {same:,} of {len(crossed):,} inputs"
        if len(beyond):
            summary += f"; {len(beyond) - wrong} labels crossed their threshold within the noise, {wrong} wrongly"
        reasons = tuple(
            f"{flip.where}: PyTorch: {flip.pytorch_class}, the runner: {flip.runner_class}; the logit is "
            f"{flip.margin:.3g} from the threshold, but noise explains at most {limit.largest:.3g}"
            for flip in flips
            if not flip.within_noise
        )
        if not len(crossed):
            reasons = ("no row of the runner's logits is finite and has the expected shape",)
        steady = ~crossed & (margins > 0)
        return Check(
            name="decisions",
            verdict="failed" if wrong or not len(crossed) else "passed",
            summary=summary,
            reasons=reasons,
            details={
                "inputs": len(crossed),
                "agreement": same / len(crossed) if len(crossed) else 0.0,
                "flips_within_noise": len(beyond) - wrong,
                "flips_wrong": wrong,
                "noise_margin": limit.largest,
                "smallest_margin": float(margins.min()) if len(margins) else None,
                "nearest_to_flipping": float((errors[steady] / margins[steady]).max()) if steady.any() else None,
                "flips": [asdict(flip) for flip in flips],
                "flips_not_listed": len(beyond) - len(flips),
            },
        )
