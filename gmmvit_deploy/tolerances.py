"""How far logits may differ, by name, with the measurement behind each number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["FP32", "Tolerance", "fp32_tolerance", "precision_tolerance"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """|found − wanted| ≤ atol + rtol · max|wanted|, for every logit.

    The scale is that of the whole tensor: a logit near zero is a difference of large terms and
    carries their rounding, not its own.
    """

    atol: float
    rtol: float

    def limit(self, wanted: NDArray[Any]) -> float:
        import numpy as np

        return self.atol + self.rtol * float(np.abs(wanted).max())

    def accepts(self, found: NDArray[Any], wanted: NDArray[Any]) -> bool:
        """False too when shapes differ or anything is not finite."""
        import numpy as np

        if found.shape != wanted.shape or not np.isfinite(found).all():
            return False
        return bool(np.abs(found - wanted).max() <= self.limit(wanted))


# ONNX Runtime against eager PyTorch on the CPU, over the golden files and ViT d6, d9, d15 and d60 with
# weights of spread 0.08: the largest seen was 9.2e-7 of the largest logit (d6). Five times that.
FP32 = Tolerance(atol=1e-6, rtol=5e-6)

_NOISE_SHARE = 4.0
_PRECISION_SHARE = 4.0


def fp32_tolerance(noise: float) -> Tolerance:
    """What another float32 runtime may differ by, for a model whose own rounding is ``noise``.

    noise: largest difference between PyTorch's float32 and float64 logits. Two float32 programs
    that add in another order are each that far from the truth; a model whose activations grow
    (T2T's, without a skip to hold them) is further than `FP32` grants, and no runtime can help it.
    """
    return Tolerance(atol=FP32.atol + _NOISE_SHARE * noise, rtol=FP32.rtol)


def precision_tolerance(noise: float, distance: float) -> Tolerance:
    """What a runtime of lower precision may differ by.

    distance: of the same graph's logits from PyTorch's on the golden inputs, every rounding of that
    precision made one by one on the CPU (see ``model.<precision>.json``). Other inputs, and sums in
    another order, round differently by some factor; a wrong answer differs by far more.
    """
    return Tolerance(atol=fp32_tolerance(noise).atol + _PRECISION_SHARE * distance, rtol=FP32.rtol)
