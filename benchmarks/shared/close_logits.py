"""Compare the logits of programs of the same network, so that only right programs are timed."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

__all__ = ["MOST_OFF", "require_close"]

MOST_OFF = {"fp32": 1e-4, "bf16": 2e-2, "int8": 1e-1}
"""Precision → the largest allowed difference, divided by the largest logit.  A rounding may fall to the other side."""


def require_close(logits: Mapping[str, np.ndarray], reference: np.ndarray, where: str, precision: str = "fp32") -> None:
    """Compare the logits of all programs with the reference.

    logits: name of a program → its logits.  where: the network and the batch, for messages.
    Errors: SystemExit when a program has another shape of logits, or differs by more than `MOST_OFF`.
    """
    most = MOST_OFF[precision]
    for name, answers in logits.items():
        if answers.shape != reference.shape:
            raise SystemExit(f"{where}: expected logits {reference.shape} of {name}, got {answers.shape}")
        off = float(np.abs(answers - reference).max() / np.abs(reference).max())
        if not off <= most:
            raise SystemExit(f"{where}: logits of {name} differ by {off:.1e}, expected at most {most:g}")
