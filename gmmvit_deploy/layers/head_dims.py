"""The head dims that fused attention kernels of GPUs take."""

from __future__ import annotations

__all__ = ["LARGEST_FUSED", "padded_head_dim"]

LARGEST_FUSED = 256
"""The largest head dim that becomes one kernel, in tensorrt-rtx 1.7.1: 256 does, 264 does not."""
_MULTIPLE, _SMALLEST = 8, 16


def padded_head_dim(head_dim: int) -> int:
    """The next head dim that needs no copies around a fused kernel: a multiple of 8, and at least 16.

    Seen in tensorrt-rtx 1.7.1 (benchmarks/reported/engines.py): 6 and 8 are not fused; 9, 12, 20 and 21 are,
    between copies that pad and cut; 16, 24, 32 and 48 are fused without any. Beyond `LARGEST_FUSED`
    nothing is, and nothing is padded.
    """
    if head_dim > LARGEST_FUSED:
        return head_dim
    return max(_SMALLEST, -(-head_dim // _MULTIPLE) * _MULTIPLE)
