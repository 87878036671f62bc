"""Limits for the distance of logits from the float64 logits, derived from PyTorch's own float32 distance.

    noise    distance of PyTorch's float32 logits from its float64 logits, on the same inputs
    fp32     largest ≤ 8 · noise + the last bit of the largest logit;          rms ≤ 3 · noise
    fp16     largest ≤ 2 · 2¹³ · noise, bf16 ≤ 2 · 2¹⁶ · noise;                rms likewise
    int8     largest ≤ 4 · recorded distance on the golden inputs;             rms not limited
    fp8      as int8

Two float32 programs that add in a different order are each about this noise away from the float64 logits. The rounding
of a narrower float, and with it the error of the logits, is larger by the ratio of the unit roundoffs (2⁻²⁴, 2⁻¹¹,
2⁻⁸). The effect of quantisation depends on the data: its limit only checks that the graph runs as recorded, and only
accuracy shows whether the graph is good.

Measurements behind the factors (``benchmarks/reported/parity_limits.py``, all golden models): correct runners reached
2.2 times the noise (rms 1.7), fp16 and bf16 0.6 times the scaled noise (rms 0.6).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gmmvit_deploy.precision import Precision

__all__ = ["MOST_NOISE", "UNIT_ROUNDOFFS", "Limit", "Noise", "limit_from_noise"]

LAST_BIT = 2.0**-23
UNIT_ROUNDOFFS: dict[str, float] = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}
_LARGEST_SHARE, _RMS_SHARE, _NARROW_SHARE, _RECORDED_SHARE = 8.0, 3.0, 2.0, 4.0
MOST_NOISE = 1e-3
"""Largest ratio of float32 noise to the largest logit at which float32 is a reference; the largest measured is 8e-6."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Distance of PyTorch's float32 logits from its float64 logits.  scale: the largest |logit|."""

    largest: float
    rms: float
    scale: float

    @property
    def usable(self) -> bool:
        """False when float32 is too coarse to be a reference for this model."""
        return self.largest <= MOST_NOISE * self.scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Largest permitted distance from the float64 logits.  rms: None for no limit on the rms.

    derivation: the same in words and numbers, for the reader who approves the report.
    """

    largest: float
    rms: float | None
    derivation: str


def limit_from_noise(noise: Noise, precision: Precision = "fp32", *, recorded: float | None = None) -> Limit:
    """Return the limit for a runner that computes in ``precision``.

    recorded: largest distance of the quantised graph's logits on the golden inputs, with every rounding emulated on the
    CPU; for int8 and fp8.
    Errors: ValueError for a quantised precision without ``recorded``.
    """
    if precision == "fp32":
        last_bit = LAST_BIT * noise.scale
        return Limit(
            largest=_LARGEST_SHARE * noise.largest + last_bit,
            rms=_RMS_SHARE * noise.rms + last_bit / 2,
            derivation=f"{_LARGEST_SHARE:g} × {noise.largest:.2g} (float32 noise) + {last_bit:.2g} (last bit of "
            f"{noise.scale:.3g}); rms {_RMS_SHARE:g} × {noise.rms:.2g} + {last_bit / 2:.2g}",
        )
    if precision in UNIT_ROUNDOFFS:
        ratio = UNIT_ROUNDOFFS[precision] / UNIT_ROUNDOFFS["fp32"]
        return Limit(
            largest=_NARROW_SHARE * ratio * noise.largest,
            rms=_NARROW_SHARE * ratio * noise.rms,
            derivation=f"{_NARROW_SHARE:g} × {ratio:g} (unit roundoff of {precision} over float32's) × "
            f"{noise.largest:.2g} (float32 noise); rms likewise × {noise.rms:.2g}",
        )
    if recorded is None:
        raise ValueError(f"{precision}: expected the graph's recorded distance, from which the limit follows, got None")
    return Limit(
        largest=_RECORDED_SHARE * recorded,
        rms=None,
        derivation=f"{_RECORDED_SHARE:g} × {recorded:.2g} ({precision}'s recorded distance on the golden inputs): "
        "it holds the runner to the recorded graph; the accuracy check judges the graph itself",
    )
