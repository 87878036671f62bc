"""Head dims that fused GPU kernels support.  A fused kernel computes the whole attention in a single kernel."""

from __future__ import annotations

LARGEST_FUSED = 256
"""The largest head dim with a fused kernel, measured in tensorrt-rtx 1.7.1: head dim 256 fuses, 264 does not."""
_MULTIPLE, _SMALLEST = 8, 16


def padded_head_dim(head_dim: int) -> int:
    """Round a head dim up to a head dim for which fused kernels need no copies: a multiple of 8, and at least 16.

    Measured in tensorrt-rtx 1.7.1 (benchmarks/engines.py): head dims 6 and 8 do not fuse. Head dims 9, 12, 20
    and 21 fuse, but copies before the kernel pad the heads, and copies after the kernel cut the padding off. Head dims
    16, 24, 32 and 48 fuse without copies. Head dims above `LARGEST_FUSED` do not fuse and are returned unchanged.
    """
    if head_dim > LARGEST_FUSED:
        return head_dim
    return max(_SMALLEST, -(-head_dim // _MULTIPLE) * _MULTIPLE)
