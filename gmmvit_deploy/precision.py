"""Supported precisions, and the precision policy: the element type of each role in each precision.

A role says what an operator of the network is for (`graphs/roles.py`). `graphs/cast.py` applies the policy, and
docs/pages/precisions.md shows the policy. Masks are folded (computed once and stored as constants) in float32 before
the cast, because small entries of the base matrix, from which a mask is computed, would become zero in half precision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from gmmvit_deploy.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "POLICY",
    "PRECISIONS",
    "ElementType",
    "Precision",
    "Role",
    "precision_from",
    "precisions_from",
]

Precision = Literal["fp32", "fp16", "bf16", "int8", "fp8"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
ElementType = Literal["float32", "float16", "bfloat16"]
Role = Literal[
    "input",
    "embedding",
    "projection",
    "depthwise",
    "product",
    "scale",
    "mask",
    "score_bias",
    "softmax",
    "mixing",
    "norm",
    "gelu",
    "activation",
    "rotation",
    "bias",
    "residual",
    "pooling",
    "head",
    "quantize",
    "shape",
    "unknown",
]
"""Role of an operator of the network; graphs/roles.py explains each role."""

_F32: ElementType = "float32"
_F16: ElementType = "float16"
_B16: ElementType = "bfloat16"

# In int8 and fp8, Q/DQ pairs additionally quantise both inputs of every projection. The matrix products of attention
# are never quantised, because Q/DQ pairs in attention prevent TensorRT from using its fused attention kernel.
POLICY: Mapping[str, Mapping[Precision, ElementType]] = {
    role: dict(zip(PRECISIONS, types, strict=True))
    for role, types in {
        #             fp32  fp16  bf16  int8  fp8
        "input":      (_F32, _F32, _F32, _F32, _F32),
        "embedding":  (_F32, _F16, _B16, _F16, _F16),
        "projection": (_F32, _F16, _B16, _F16, _F16),
        "quantize":   (_F32, _F16, _B16, _F16, _F16),
        "depthwise":  (_F32, _F16, _B16, _F16, _F16),
        "product":    (_F32, _F16, _B16, _F16, _F16),
        "scale":      (_F32, _F16, _B16, _F16, _F16),
        "mask":       (_F32, _F16, _B16, _F16, _F16),
        "score_bias": (_F32, _F16, _B16, _F16, _F16),
        "softmax":    (_F32, _F32, _F32, _F32, _F32),
        "mixing":     (_F32, _F16, _B16, _F16, _F16),
        "norm":       (_F32, _F32, _F32, _F32, _F32),
        "gelu":       (_F32, _F16, _B16, _F16, _F16),
        "activation": (_F32, _F16, _B16, _F16, _F16),
        "rotation":   (_F32, _F16, _B16, _F16, _F16),
        "bias":       (_F32, _F16, _B16, _F16, _F16),
        "residual":   (_F32, _F16, _B16, _F16, _F16),
        "pooling":    (_F32, _F32, _F32, _F32, _F32),
        "head":       (_F32, _F32, _F32, _F32, _F32),
        "unknown":    (_F32, _F32, _F32, _F32, _F32),
    }.items()
}  # fmt: skip


def precision_from(text: str) -> Precision:
    """Parse the name of a precision.  Errors: InputError when the name is unknown."""
    if text not in PRECISIONS:
        raise InputError(f"precision {text!r} is not known", hint=f"type one of {', '.join(PRECISIONS)}")
    return text


def precisions_from(text: str) -> tuple[Precision, ...]:
    """Parse names such as ``fp16,int8`` into different precisions.

    Errors: InputError when a name is unknown, or when there is no name.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise InputError(
            "expected at least one precision, got an empty list", hint=f"type one or more of {', '.join(PRECISIONS)}"
        )
    return tuple(dict.fromkeys(precision_from(part) for part in parts))
