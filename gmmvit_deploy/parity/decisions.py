"""Compare the class that the runner predicts with the class that PyTorch predicts.

    flip     an input for which the two classes differ
    t        PyTorch's float64 logits of an input
    margin   t[PyTorch's class] − t[the runner's class] for a flip;
             largest logit − second largest logit of t for every other input

Each logit of the runner may differ from t by the limit of the numeric check. Two logits that differ by at most twice
the limit can therefore change places: such a flip is within the noise. A flip with a larger margin is a wrong
prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.images.labels import distinct_names
from gmmvit_deploy.parity.verdict import Check
from gmmvit_deploy.tolerances import Limit

__all__ = ["MOST_LISTED", "Decisions", "Flip"]

MOST_LISTED = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """An input that the runner and PyTorch classify differently.

    where: a text that identifies the input.  pytorch_class, runner_class: the distinct names of the predicted classes.
    margin: as defined at the head of this module.  within_noise: True if the margin is at most twice the limit.
    """

    where: str
    pytorch_class: str
    runner_class: str
    margin: float
    within_noise: bool


class Decisions:
    """Accumulate predicted classes batch by batch, with the margin and the largest error of each input."""

    def __init__(self, labels: Sequence[str]) -> None:
        self._labels = distinct_names(labels)
        self._margins: list[NDArray[Any]] = []
        self._errors: list[NDArray[Any]] = []
        self._flipped: list[NDArray[Any]] = []
        self._seen = 0
        self._flips: list[tuple[str, int, int, float]] = []

    def add(self, where: Sequence[str], logits: NDArray[Any], trained: NDArray[Any], exact: NDArray[Any]) -> None:
        """Add a batch.

        where: a text that identifies each input.  logits: (B, C), the finite logits of the runner.
        trained, exact: (B, C), PyTorch's float32 and float64 logits.
        """
        pytorch_class, runner_class = trained.argmax(1), logits.argmax(1)
        rows = np.arange(len(logits))
        runner_up = np.partition(exact, -2, axis=1)[:, -2] if exact.shape[1] > 1 else exact[:, 0]
        flipped = pytorch_class != runner_class
        margins = np.where(flipped, exact[rows, pytorch_class] - exact[rows, runner_class], exact.max(1) - runner_up)
        self._margins.append(margins.astype(np.float32))
        self._errors.append(np.abs(logits - exact).max(1).astype(np.float32))
        self._flipped.append(flipped)
        self._seen += len(logits)
        for row in np.flatnonzero(flipped)[: MOST_LISTED - len(self._flips)]:
            self._flips.append((where[row], int(pytorch_class[row]), int(runner_class[row]), float(margins[row])))

    def points(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Return three arrays (N,) over all inputs: the margins, the largest errors, and True for each flip."""
        if not self._margins:
            return np.zeros(0, np.float32), np.zeros(0, np.float32), np.zeros(0, bool)
        return np.concatenate(self._margins), np.concatenate(self._errors), np.concatenate(self._flipped)

    def check(self, limit: Limit) -> Check:
        """Fail if the margin of any flip is larger than twice the limit, or if no logits could be compared.

        limit: the limit of the numeric check.
        """
        margins, errors, flipped = self.points()
        threshold = 2 * limit.largest
        total = int(flipped.sum())
        wrong = int((flipped & (margins > threshold)).sum())
        flips = [
            Flip(
                where=where,
                pytorch_class=self._labels[pytorch_class],
                runner_class=self._labels[runner_class],
                margin=margin,
                within_noise=margin <= threshold,
            )
            for where, pytorch_class, runner_class, margin in self._flips
        ]
        agreement = 1 - total / self._seen if self._seen else 0.0
        summary = f"the same class on {self._seen - total:,} of {self._seen:,} inputs"
        if total:
            summary += f"; {total - wrong} flips within the noise, {wrong} wrong"
        reasons = tuple(
            f"{flip.where}: PyTorch predicts {flip.pytorch_class}, the runner {flip.runner_class}; "
            f"the margin is {flip.margin:.3g}, but noise explains at most {threshold:.3g}"
            for flip in flips
            if not flip.within_noise
        )
        if not self._seen:
            reasons = ("no row of the runner's logits is finite and has the expected shape",)
        smallest = float(margins.min()) if len(margins) else None
        return Check(
            name="decisions",
            verdict="failed" if wrong or not self._seen else "passed",
            summary=summary,
            reasons=reasons,
            details={
                "inputs": self._seen,
                "agreement": agreement,
                "flips_within_noise": total - wrong,
                "flips_wrong": wrong,
                "noise_margin": threshold,
                "smallest_margin": smallest,
                "nearest_to_flipping": _nearest(margins, errors, flipped),
                "flips": [asdict(flip) for flip in flips],
                "flips_not_listed": total - len(flips),
            },
        )


def _nearest(margins: NDArray[Any], errors: NDArray[Any], flipped: NDArray[Any]) -> float | None:
    """Return the largest 2 · error / margin of all inputs that did not flip; at 1 or above, a flip is possible."""
    steady = ~flipped & (margins > 0)
    return float((2 * errors[steady] / margins[steady]).max()) if steady.any() else None
