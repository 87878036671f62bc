"""Logits in float64, and the comparison of logits before and after a change that must keep them.

A change keeps the logits if it is exact in real numbers: a folding pass, a pass for engines, another order of reading.
In float64, the logits then differ only by rounding.
"""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import Tensor, nn

_ATOL = 1e-12  # largest seen: 2e-14, for logits of up to 4


def exact_logits(model: nn.Module, images: np.ndarray | Tensor) -> np.ndarray:
    """Return the logits of a float64 copy of the model, without a gradient.  images: (B, c, S, S) of any data type."""
    with torch.inference_mode():
        logits: np.ndarray = copy.deepcopy(model).double()(torch.as_tensor(images).double()).numpy()
    return logits


def assert_same_logits(
    logits: np.ndarray | Tensor, expected: np.ndarray | Tensor, what: str = "", *, atol: float = _ATOL
) -> None:
    """Check that float64 logits differ only by rounding.

    what: the change, for the message.  atol: another limit, for a change that is not exact in real numbers.
    """
    given, before = (torch.as_tensor(values).detach().numpy() for values in (logits, expected))
    assert given.dtype == before.dtype == np.float64, f"expected float64, got {given.dtype} and {before.dtype}"
    np.testing.assert_allclose(given, before, rtol=0, atol=atol, err_msg=what)
