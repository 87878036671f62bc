"""Compare a program's speed before and after a change, with an A/A control in the same run.

An A/A control times two processes of the same program; any difference of their times is noise of the measurement.

    change  = time after / time before
    control = time of a second process of the program before the change / time before
    allowed = max(2 %, |control − 1|)

The program after the change is as fast as before if |change − 1| ≤ allowed. The two times of a ratio are measured in
the same rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gmmvit_deploy.bench.statistics import Ratio

__all__ = ["LEAST_ALLOWED", "Change"]

LEAST_ALLOWED = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The speed of a program after a change.

    ratio: the time after the change divided by the time before.
    control: the time of a second process of the program before the change, divided by the time before.
    """

    ratio: Ratio
    control: Ratio

    @property
    def allowed(self) -> float:
        """The largest |ratio − 1| that counts as equally fast."""
        return max(LEAST_ALLOWED, abs(self.control.median - 1))

    @property
    def verdict(self) -> Literal["as fast", "slower", "faster"]:
        """The verdict. It depends only on the medians of the ratios, not on their intervals."""
        deviation = self.ratio.median - 1
        if abs(deviation) <= self.allowed:
            return "as fast"
        return "slower" if deviation > 0 else "faster"
