"""Compare the outputs of a program with the reference outputs of a bundle, which PyTorch computed at export."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np


class OutputShapeError(Exception):
    """An output has another shape than the reference output."""


def largest_differences(
    answers: Callable[[Any], Sequence[Any]], inputs: Any, expected: Mapping[Any, Any], size: int
) -> dict[Any, float]:
    """Run all inputs in batches, and return name of an output → its largest absolute difference, which may be NaN.

    answers: a function of a batch that returns its outputs, in the order of ``expected``.
    inputs: (N, …).  expected: name of an output → its values (N, …).
    size: the number of rows of each batch; rows are repeated to fill the last one.
    Errors: OutputShapeError when an output has another shape.  Every error of ``answers``.
    """
    largest = dict.fromkeys(expected, 0.0)
    for start in range(0, len(inputs), size):
        rows = np.resize(np.arange(start, min(start + size, len(inputs))), size)
        for (output, values), computed in zip(expected.items(), answers(inputs[rows]), strict=True):
            shape = (size, *values.shape[1:])
            if computed.shape != shape:
                raise OutputShapeError(f"expected {output} of shape {shape}, got {computed.shape}")
            largest[output] = float(np.maximum(largest[output], np.abs(computed - values[rows]).max()))
    return largest


def wrong_output(differences: Mapping[Any, float], limits: Mapping[Any, float]) -> str:
    """Describe the first output whose difference exceeds its limit or is NaN; "" if there is none."""
    for output, difference in differences.items():
        if not difference <= limits[output]:  # also True if the difference is NaN, unlike difference > limit
            return f"the {output} differ from PyTorch's by {difference:.3g}; expected at most {limits[output]:.3g}"
    return ""


def wrong_in_batch(
    answers: Callable[[Any], Sequence[Any]],
    inputs: Any,
    expected: Mapping[Any, Any],
    limits: Mapping[Any, float],
    size: int,
) -> str:
    """Describe how a program differs from the reference outputs in batches of ``size``; "" if it does not.

    answers, inputs, expected: as for `largest_differences`.  limits: name of an output → the largest difference.
    """
    try:
        problem = wrong_output(largest_differences(answers, inputs, expected, size), limits)
    except OutputShapeError as exc:
        problem = str(exc)
    return problem and f"on the reference inputs, in a batch of {size}, {problem}"
