"""Compare a program's speed before and after a change, against an A/A control of the same run.

change  = time after / time before        both within the same round
control = time before / time before       two processes of the same program, in the same rounds
allowed = max(2 %, |control − 1|)         as fast: |change − 1| ≤ allowed
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gmmvit_deploy.bench.statistics import Ratio

__all__ = ["LEAST_ALLOWED", "Change"]

LEAST_ALLOWED = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """ratio: time after / time before.  control: time of a second process of the old program / time before."""

    ratio: Ratio
    control: Ratio

    @property
    def allowed(self) -> float:
        """Largest |ratio − 1| that counts as equally fast."""
        return max(LEAST_ALLOWED, abs(self.control.median - 1))

    @property
    def verdict(self) -> Literal["as fast", "slower", "faster"]:
        """Verdict by the medians; the intervals show its uncertainty."""
        deviation = self.ratio.median - 1
        if abs(deviation) <= self.allowed:
            return "as fast"
        return "slower" if deviation > 0 else "faster"
