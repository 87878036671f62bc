"""Head dims that fused attention kernels on GPUs support."""

from __future__ import annotations

__all__ = ["LARGEST_FUSED", "padded_head_dim"]

LARGEST_FUSED = 256
"""Largest head dim with a fused kernel, measured in tensorrt-rtx 1.7.1: 256 fuses, 264 does not."""
_MULTIPLE, _SMALLEST = 8, 16


def padded_head_dim(head_dim: int) -> int:
    """Round a head dim up to a multiple of 8 that is at least 16: fused kernels need no copies for such head dims.

    Measured in tensorrt-rtx 1.7.1 (benchmarks/reported/engines.py): head dims 6 and 8 do not fuse; 9, 12, 20 and 21
    fuse, with copies before and after the kernel that pad and cut; 16, 24, 32 and 48 fuse without copies. Head dims
    above `LARGEST_FUSED` do not fuse and are returned unchanged.
    """
    if head_dim > LARGEST_FUSED:
        return head_dim
    return max(_SMALLEST, -(-head_dim // _MULTIPLE) * _MULTIPLE)
