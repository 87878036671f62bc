"""How far logits may differ from the truth, derived from how far PyTorch itself is from it.

    noise    distance of PyTorch's float32 logits from its float64 logits, on the same inputs
    fp32     largest ≤ 8 · noise + the last bit of the largest logit;          rms ≤ 3 · noise
    fp16     largest ≤ 2 · 2¹³ · noise, bf16 ≤ 2 · 2¹⁶ · noise;                rms likewise
    int8     largest ≤ 4 · that graph's own distance on the golden inputs;     rms not limited
    fp8      as int8

Two float32 programs that add in another order are each about that noise away from the truth. The
rounding of a narrower float is larger by the ratio of the unit roundoffs (2⁻²⁴, 2⁻¹¹, 2⁻⁸), and so
are the logits' errors. What quantisation does depends on the data: there a limit can only say that
the graph is run as it was recorded, and accuracy has to say whether the graph is good.

The factors, with what was measured (``benchmarks/reported/parity_limits.py``, all golden models): right runners
came to 2.2 times the noise (rms 1.7), fp16 and bf16 to 0.6 times the scaled noise (rms 0.6).
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
"""Float32 noise over the largest logit beyond which float32 itself is no reference: the largest seen was 8e-6."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Distance of PyTorch's float32 logits from its float64 logits.  scale: the largest |logit|."""

    largest: float
    rms: float
    scale: float

    @property
    def usable(self) -> bool:
        """False when float32 is too coarse for this model to be a reference at all."""
        return self.largest <= MOST_NOISE * self.scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What the distance from the float64 logits may be.  rms: None where nothing limits it.

    derivation: the same in words and numbers, for whoever signs.
    """

    largest: float
    rms: float | None
    derivation: str


def limit_from_noise(noise: Noise, precision: Precision = "fp32", *, recorded: float | None = None) -> Limit:
    """The limit for a runner that computes in ``precision``.

    recorded: largest distance of the quantised graph's logits on the golden inputs, every rounding
    made on the CPU; for int8 and fp8.
    Errors: ValueError when a quantised precision comes without it.
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
        raise ValueError(f"{precision}: the limit follows from the graph's own recorded distance, and none was given")
    return Limit(
        largest=_RECORDED_SHARE * recorded,
        rms=None,
        derivation=f"{_RECORDED_SHARE:g} × {recorded:.2g} ({precision}'s recorded distance on the golden inputs): "
        "says that the graph is run as recorded; accuracy says whether it is good",
    )
