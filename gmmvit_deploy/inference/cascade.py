"""Compute a batch in a fast program, and the images that it leaves nearly undecided again in float32.

    margin, single-label   the largest logit minus the second largest
    margin, multi-label    the smallest |logit − threshold of its label|
    deferred               images whose margin in the fast program is below a threshold

A fast precision changes few decisions, and most of them where the margin is small. The answer of a deferred image is
that of the float32 program. The deferred images of a batch run as one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def decision_margins(logits: Any, label_thresholds: Any = None) -> Any:
    """Return the margins (B,) of logits (B, C).  label_thresholds: (C,), as logits, of a multi-label network."""
    if label_thresholds is not None:
        return np.abs(logits - label_thresholds).min(1)
    two = np.partition(logits, -2, axis=1)[:, -2:]
    return two[:, 1] - two[:, 0]


class Cascade:
    """A fast program, and a float32 program for the images that it defers.

    first, second: functions of a batch that return its outputs, the logits first.
    threshold: images with a smaller margin, or without one that is finite, are deferred.
    label_thresholds: as for `decision_margins`.
    """

    def __init__(
        self,
        first: Callable[[Any], Sequence[Any]],
        second: Callable[[Any], Sequence[Any]],
        threshold: float,
        label_thresholds: Any = None,
    ) -> None:
        self._first, self._second = first, second
        self._threshold, self._label_thresholds = threshold, label_thresholds

    def answers(self, batch: Any) -> list[Any]:
        """Return all outputs of the programs for a batch, and after them `DEFERRED` (B, 1)."""
        outputs = list(self._first(batch))
        margins = decision_margins(outputs[0], self._label_thresholds)
        deferred = ~(np.isfinite(margins) & (margins >= self._threshold))
        if deferred.any():
            again = self._second(np.ascontiguousarray(batch[deferred]))
            outputs = [np.array(rows) for rows in outputs]
            for rows, exact in zip(outputs, again, strict=True):
                rows[deferred] = exact
        return [*outputs, deferred[:, None]]
