"""Limits for the difference between a runner's logits and PyTorch's float64 logits.

The noise of a model is the difference between PyTorch's float32 logits and PyTorch's float64 logits on the same inputs.

    precision   largest difference at most                        rms difference at most
    fp32        8 · noise + the last bit of the largest logit     3 · noise + half of that last bit
    fp16        2 · 2¹³ · noise                                   2 · 2¹³ · noise
    bf16        2 · 2¹⁶ · noise                                   2 · 2¹⁶ · noise
    int8, fp8   4 · recorded difference on the golden inputs      no limit

In the column "largest difference", noise means the largest difference of the float32 logits from the float64 logits. In
the column "rms difference", noise means the root mean square (rms) of these differences.

The logits of every correct float32 program differ from the float64 logits by about the noise, because programs add in
different orders. In fp16 and bf16, the rounding errors are larger by the ratio of the unit roundoffs (fp32 2⁻²⁴, fp16
2⁻¹¹, bf16 2⁻⁸), and the errors of the logits grow by the same ratio. The effect of quantisation depends on the data.
The limit for int8 and fp8 therefore only checks that a runner computes the graph as recorded at conversion. Whether the
quantised graph is good enough is shown by its accuracy.

Measurements behind the factors (``benchmarks/parity_limits.py``, all golden models): correct fp32 runners
reached 2.2 times the noise (rms 1.7 times); correct fp16 and bf16 runners reached 0.6 times the noise after scaling by
the ratio of the unit roundoffs (rms 0.6 times).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.inference.precision import QUANTIZED, SPECS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gmmvit_deploy.inference.precision import Precision

LAST_BIT = 2.0**-23
_LARGEST_SHARE, _RMS_SHARE, _NARROW_SHARE, _RECORDED_SHARE = 8.0, 3.0, 2.0, 4.0
_MAX_NOISE = 1e-3
"""Maximum of the noise divided by the largest logit for float32 to be a reference.  Measured models reach 8e-6."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Difference between PyTorch's float32 logits and PyTorch's float64 logits, on the same inputs.

    largest: the largest absolute difference.  rms: the root mean square.  scale: the largest |logit|.
    """

    largest: float
    rms: float
    scale: float

    @property
    def usable(self) -> bool:
        """True if PyTorch's float32 logits of this model are accurate enough to be a reference."""
        return self.largest <= _MAX_NOISE * self.scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Limit for the difference between a runner's logits and the float64 logits.

    largest: the limit for the largest absolute difference.  rms: the limit for the rms, or None for no limit.
    derivation: the computation of the limits in words and numbers, for the person who approves the release.
    """

    largest: float
    rms: float | None
    derivation: str


def roundoff_ratio(precision: Precision) -> float:
    """Return the unit roundoff of a precision divided by that of float32.  Errors: ValueError for a quantised one."""
    roundoff, float32 = SPECS[precision].unit_roundoff, SPECS["fp32"].unit_roundoff
    if roundoff is None or float32 is None:
        raise ValueError(f"{precision}: the rounding error of a quantised precision depends on the data")
    return roundoff / float32


def limit_from_noise(noise: Noise, precision: Precision = "fp32", *, recorded: float | None = None) -> Limit:
    """Return the limit for a runner that computes in ``precision``.

    recorded: for int8 and fp8, the largest difference that conversion recorded on the golden inputs. The recorded
    logits are computed on the CPU, with every rounding of the graph emulated.
    Errors: ValueError when ``recorded`` is None for int8 or fp8.
    """
    if precision == "fp32":
        last_bit = LAST_BIT * noise.scale
        return Limit(
            largest=_LARGEST_SHARE * noise.largest + last_bit,
            rms=_RMS_SHARE * noise.rms + last_bit / 2,
            derivation=f"{_LARGEST_SHARE:g} × {noise.largest:.2g} (float32 noise) + {last_bit:.2g} (last bit of "
            f"{noise.scale:.3g}); rms {_RMS_SHARE:g} × {noise.rms:.2g} + {last_bit / 2:.2g}",
        )
    if precision not in QUANTIZED:
        ratio = roundoff_ratio(precision)
        return Limit(
            largest=_NARROW_SHARE * ratio * noise.largest,
            rms=_NARROW_SHARE * ratio * noise.rms,
            derivation=f"{_NARROW_SHARE:g} × {ratio:g} (unit roundoff of {precision} divided by that of float32) × "
            f"{noise.largest:.2g} (float32 noise); rms likewise × {noise.rms:.2g}",
        )
    if recorded is None:
        raise ValueError(f"{precision}: expected the graph's recorded distance, from which the limit follows, got None")
    return Limit(
        largest=_RECORDED_SHARE * recorded,
        rms=None,
        derivation=f"{_RECORDED_SHARE:g} × {recorded:.2g} ({precision}'s distance, recorded at conversion): "
        "the limit compares the runner with the recorded graph; the accuracy check judges the graph itself",
    )


def limit_from_stored(noise: Noise, precision: Precision = "fp32", *, recorded: float | None = None) -> Limit:
    """Return the limit for a runner that is compared with PyTorch's float32 logits, which are stored at export.

    noise: ``largest`` is the largest noise recorded at export; the rms is not recorded, so it has no limit. The stored
    logits differ from the float64 logits by at most the noise, which is added to the limit for the float64 logits.
    precision, recorded: as in `limit_from_noise`.
    """
    limit = limit_from_noise(noise, precision, recorded=recorded)
    return Limit(
        largest=limit.largest + noise.largest,
        rms=None,
        derivation=f"{limit.derivation.partition('; rms')[0]} + {noise.largest:.2g} (the stored logits are float32)",
    )


def signal_to_noise_db(logits: NDArray[Any], reference: NDArray[Any], *, over_images: bool = False) -> float:
    """Return 10 · log₁₀ of the variance of the centred reference logits over the mean square of the difference, in dB.

    The logits of each image are centred, as softmax ignores their mean. A sigmoid does not ignore it: the logits of a
    multi-label network, and a single logit, are centred over the images, each class by itself.

    logits, reference: (B, C).  over_images: True to centre over the images.  The result is at most 200 dB.
    """
    import numpy as np

    axis = 0 if over_images or reference.shape[1] == 1 else 1
    variance = float((reference - reference.mean(axis, keepdims=True)).var())
    error = max(float(((logits - reference) ** 2).mean()), variance * 1e-20)
    return float(10 * np.log10(variance / error)) if variance else 0.0
