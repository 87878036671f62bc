"""Were the answers right while the clock ran?  Every logit of every timed run, held to PyTorch's."""

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
    """largest: distance of any logit from the truth, over all rounds; NaN where one was not finite.

    sha256: of every answer of every round.
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
    """The truth for the inputs of a run: PyTorch in float64, and the limits that follow (`tolerances`)."""

    def __init__(self, bundle: Bundle, inputs: NDArray[Any]) -> None:
        from gmmvit_deploy.parity.reference import Reference  # imports torch, which reports and comparisons do not need

        reference = Reference(bundle)
        parts = [reference.logits(inputs[start : start + _BATCH]) for start in range(0, len(inputs), _BATCH)]
        trained, self._exact = (np.concatenate([part[which] for part in parts]) for which in (0, 1))
        measure = ErrorMeasure()
        measure.add(trained, self._exact)
        self._noise = measure.noise()
        self._bundle = bundle

    def largest(self, indices: NDArray[Any], outputs: NDArray[Any]) -> float:
        """Distance of the answers to these samples from the truth."""
        return distance(outputs, self._exact[indices])

    def judged(self, precision: Precision, *, answers: int, largest: float, sha256: str) -> OutputCheck:
        """What was collected over the rounds, with the limit of the precision."""
        record = open_variant(self._bundle, precision).record if precision in QUANTIZED else None
        limit = limit_from_noise(self._noise, precision, recorded=record.golden["largest_abs"] if record else None)
        return OutputCheck(
            answers=answers, largest=largest, limit=limit.largest, derivation=limit.derivation, sha256=sha256
        )
