"""Check the answers of timed runs: compare every logit of every run with PyTorch's float64 logits."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.bundle.variants import recorded_distances
from gmmvit_deploy.inference.precision import Form, Precision
from gmmvit_deploy.parity.inputs import golden_batch
from gmmvit_deploy.parity.measures import ErrorMeasure, distance
from gmmvit_deploy.tolerances import Limit, limit_from_noise, limit_from_stored

_BATCH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputCheck:
    """largest: the largest distance of a logit from PyTorch's float64 logit; NaN if a logit is not finite.
    sha256: of all answers.
    """

    answers: int
    largest: float
    limit: float
    sha256: str

    @property
    def right(self) -> bool:
        return self.largest <= self.limit


def stored_inputs(bundle: Bundle, count: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return ``count`` golden inputs of the bundle, repeated as needed, and the logits that PyTorch stored for them."""
    golden, stored = golden_batch(bundle)
    rows = np.resize(np.arange(len(stored)), count)
    return golden.inputs[rows], stored[rows]


class Expected:
    """PyTorch's float64 logits ``exact`` (N, C) for the inputs of a run, and the limits for a runner's (`tolerances`).

    Without a model, the inputs must be those of `stored_inputs`, whose stored logits are the reference.
    """

    def __init__(self, bundle: Bundle, inputs: NDArray[Any]) -> None:
        # These modules import torch, which reports do not need.
        from gmmvit_deploy.parity.reference import Reference, why_no_model

        self._bundle, self._limit = bundle, limit_from_noise
        if why_no_model(bundle):
            _, self.exact = stored_inputs(bundle, len(inputs))
            self._noise, self._limit = bundle.stored_noise(self.exact), limit_from_stored
            return
        reference = Reference(bundle)
        parts = [reference.logits(inputs[start : start + _BATCH]) for start in range(0, len(inputs), _BATCH)]
        trained, self.exact = (np.concatenate([part[which] for part in parts]) for which in (0, 1))
        measure = ErrorMeasure()
        measure.add(trained, self.exact)
        self._noise = measure.noise()

    def limit(self, precision: Precision, form: Form = "") -> Limit:
        """Return the limit of the distance in this precision.  form: of a graph for CPUs in int8."""
        recorded = recorded_distances(self._bundle, precision, form).get("largest_abs")
        return self._limit(self._noise, precision, recorded=recorded)


class Answers:
    """The answers of a runner in all its runs, each compared with the expected logits when it is added."""

    def __init__(self, expected: Expected) -> None:
        self._expected = expected
        self._digest = hashlib.sha256()
        self._count, self._largest = 0, 0.0

    def add(self, indices: NDArray[Any], outputs: NDArray[Any]) -> None:
        """Add the answers of a run: the logits (n, C) of the inputs ``indices`` (n,)."""
        largest = distance(outputs, self._expected.exact[indices])
        self._largest = math.nan if math.isnan(largest + self._largest) else max(self._largest, largest)
        self._count += len(indices)
        # In the order of the indices, so that the order in which several threads answer changes nothing.
        ordered = np.ascontiguousarray(outputs[np.argsort(indices, kind="stable")], dtype="<f4")
        self._digest.update(hashlib.sha256(ordered.tobytes()).hexdigest().encode())

    def check(self, precision: Precision, form: Form = "") -> OutputCheck:
        """Compare the largest distance with the limit of the precision.  form: as in `Expected.limit`."""
        limit = self._expected.limit(precision, form).largest
        return OutputCheck(answers=self._count, largest=self._largest, limit=limit, sha256=self._digest.hexdigest())
