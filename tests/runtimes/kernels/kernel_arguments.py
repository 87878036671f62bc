"""The arguments of our attention kernel, for callers in Python."""

from __future__ import annotations

import ctypes

__all__ = ["MaskedAttention"]


class MaskedAttention(ctypes.Structure):
    """`MaskedAttention` of gmmvit_deploy/runtimes/kernels/masked_attention.h, in the same order."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "mask", "bias", "before", "after")),
        *((name, ctypes.c_int64) for name in ("q_row", "k_row", "v_row")),
        *((name, ctypes.c_int32) for name in ("batch", "heads", "queries", "n", "d", "mask_heads", "bias_heads")),
        *((name, ctypes.c_int32) for name in ("windows", "arithmetic", "rounded", "grid")),
        ("scale", ctypes.c_float),
        ("steps", ctypes.c_float),
        ("quantised", ctypes.c_void_p),
    )
