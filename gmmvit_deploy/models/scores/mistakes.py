"""Usual mistakes with the matrix of a mask: transposed, shifted, assigned to another head, or omitted."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor


def matrix_mistakes(matrix: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield (description of the mistake, matrix with the mistake) for each usual mistake.

    If a mistake has no effect on the matrix, the mistake is yielded with the unchanged matrix.
    matrix: (H, N, N), (1, N, N) or (N, N). Mistakes that confuse heads change only a matrix with several heads.
    """
    for name, change in _MISTAKES:
        yield name, change(matrix)


def _swap_first_heads(matrix: Tensor) -> Tensor:
    if matrix.ndim < 3 or matrix.shape[-3] < 2:
        return matrix
    order = [1, 0, *range(2, matrix.shape[-3])]
    return matrix[..., order, :, :]


_MISTAKES: tuple[tuple[str, Callable[[Tensor], Tensor]], ...] = (
    ("no mask at all", torch.ones_like),
    ("masks transposed", lambda m: m.transpose(-1, -2)),
    ("masks of the heads in reverse order", lambda m: m.flip(-3) if m.ndim > 2 else m),
    ("masks of the heads moved on by one", lambda m: m.roll(1, -3) if m.ndim > 2 else m),
    ("masks of the first two heads exchanged", _swap_first_heads),
    ("masks shifted by one token, down", lambda m: m.roll(1, -2)),
    ("masks shifted by one token, across", lambda m: m.roll(1, -1)),
    ("masks shifted by one token, down and across", lambda m: m.roll((1, 1), (-2, -1))),
)
