"""Round a weight so that the outputs on calibration data change least, not each value to the nearest step (GPTQ).

    minimise ‖(W − Ŵ) X‖²  for the inputs X of the projection:  the columns of W are rounded one after the other, and
    the error of each is compensated in the columns that follow, by the inverse of the second moments H = X Xᵀ.

Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers".
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_DAMPING = 0.01
_BLOCK = 32


def compensated_rounding(
    weight: NDArray[Any], moments: NDArray[Any], scales: NDArray[Any], *, largest: float
) -> NDArray[Any]:
    """Return integers (out, in), int8, of which each row times its scale approximates the row of ``weight``.

    weight: (out, in).  moments: (in, in), the sum of x xᵀ over inputs x of the projection.  scales: (out,).
    largest: the largest magnitude of an integer, at most 127.
    """
    count = weight.shape[1]
    diagonal = np.diag(moments).astype(np.float64)
    order = np.argsort(-diagonal, kind="stable")  # columns that matter most are rounded first
    rest = weight.T[order].astype(np.float64)  # a row for each column of the weight
    hessian = moments[np.ix_(order, order)].astype(np.float64)
    # A channel that is always 0 has no moments; the damping makes the matrix invertible.
    hessian[np.diag_indices(count)] += _DAMPING * diagonal.mean() or 1.0
    upper = np.linalg.cholesky(np.linalg.inv(hessian)).T
    rounded = np.zeros_like(rest)
    for start in range(0, count, _BLOCK):
        stop = min(start + _BLOCK, count)
        errors = np.zeros((stop - start, rest.shape[1]))
        for column in range(start, stop):
            rounded[column] = np.clip(np.rint(rest[column] / scales), -largest, largest)
            error = (rest[column] - rounded[column] * scales) / upper[column, column]
            rest[column + 1 : stop] -= np.outer(upper[column, column + 1 : stop], error)
            errors[column - start] = error
        rest[stop:] -= upper[start:stop, stop:].T @ errors
    result: NDArray[Any] = rounded[np.argsort(order)].T.astype(np.int8)
    return result
