"""Supported precisions, and the policy: the element type of each part of the network in each precision.

The policy is a single table, which the cast pass applies and docs/pages/precisions.md prints. Masks are folded in
float32 before they are cast: an unfolded base mask flushes to zero in half precision.
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
    "precision_behind",
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
    "bias",
    "residual",
    "pooling",
    "head",
    "quantize",
    "shape",
    "unknown",
]
"""Role of a part of the network in the policy; graphs/roles.py explains each role."""

_F32: ElementType = "float32"
_F16: ElementType = "float16"
_B16: ElementType = "bfloat16"

# In int8 and fp8 both inputs of a projection additionally go through Q/DQ pairs. The products of attention are never
# quantised, because int8 there prevents the fused kernel.
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
        "bias":       (_F32, _F16, _B16, _F16, _F16),
        "residual":   (_F32, _F16, _B16, _F16, _F16),
        "pooling":    (_F32, _F32, _F32, _F32, _F32),
        "head":       (_F32, _F32, _F32, _F32, _F32),
        "unknown":    (_F32, _F32, _F32, _F32, _F32),
    }.items()
}  # fmt: skip


def precision_from(text: str) -> Precision:
    """Parse the name of a precision.  Errors: InputError when it is unknown."""
    if text not in PRECISIONS:
        raise InputError(f"precision {text!r} is not known", hint=f"known: {', '.join(PRECISIONS)}")
    return text


def precision_behind(text: str) -> tuple[str, Precision | None]:
    """Split ``openvino:bf16`` into (openvino, bf16); None without a precision.  Errors: as `precision_from`."""
    name, colon, precision = text.strip().partition(":")
    return name, precision_from(precision) if colon else None


def precisions_from(text: str) -> tuple[Precision, ...]:
    """Parse ``fp16,int8`` into precisions, each once.  Errors: InputError on an unknown name or an empty list."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise InputError("no precision was named", hint=f"known: {', '.join(PRECISIONS)}")
    return tuple(dict.fromkeys(precision_from(part) for part in parts))
