"""Check the answers of timed runs: compare every logit of every run with PyTorch's float64 logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.artifacts import Bundle
from gmmvit_deploy.graphs.quantize import QUANTIZED
from gmmvit_deploy.parity.measures import ErrorMeasure, distance
from gmmvit_deploy.precision import Precision
from gmmvit_deploy.tolerances import limit_from_noise
from gmmvit_deploy.variants import open_variant

__all__ = ["Expected", "OutputCheck"]

_BATCH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputCheck:
    """The check of a runner's answers.

    answers: the number of compared answers; an answer is the logits of a sample.
    largest: the largest distance of a logit from PyTorch's float64 logit, over all rounds. NaN if any logit is not
    finite.
    limit: the largest allowed distance.  derivation: the computation of the limit, in words.
    sha256: the hash of all answers of all rounds.
    """

    answers: int
    largest: float
    limit: float
    derivation: str
    sha256: str

    @property
    def right(self) -> bool:
        return self.largest <= self.limit


class Expected:
    """PyTorch's float64 logits for the inputs of a run, and the limits for a runner's logits (`tolerances`)."""

    def __init__(self, bundle: Bundle, inputs: NDArray[Any]) -> None:
        from gmmvit_deploy.parity.reference import Reference  # this module imports torch, which reports do not need

        reference = Reference(bundle)
        parts = [reference.logits(inputs[start : start + _BATCH]) for start in range(0, len(inputs), _BATCH)]
        trained, self._exact = (np.concatenate([part[which] for part in parts]) for which in (0, 1))
        measure = ErrorMeasure()
        measure.add(trained, self._exact)
        self._noise = measure.noise()
        self._bundle = bundle

    def largest(self, indices: NDArray[Any], outputs: NDArray[Any]) -> float:
        """Return the largest distance of ``outputs`` from PyTorch's float64 logits.

        indices: the samples' indices (n,) in the inputs.  outputs: the logits (n, C) of these samples.
        """
        return distance(outputs, self._exact[indices])

    def judged(self, precision: Precision, *, answers: int, largest: float, sha256: str) -> OutputCheck:
        """Compare the largest distance over all rounds with the limit of the precision.

        answers, largest, sha256: as in `OutputCheck`.
        """
        record = open_variant(self._bundle, precision).record if precision in QUANTIZED else None
        limit = limit_from_noise(self._noise, precision, recorded=record.golden["largest_abs"] if record else None)
        return OutputCheck(
            answers=answers, largest=largest, limit=limit.largest, derivation=limit.derivation, sha256=sha256
        )
