"""Sinusoidal position embeddings, which follow from the number of tokens and the width.

P[i, j] = sin(i / 10000^(j/D)) for even j,  cos(i / 10000^((j−1)/D)) for odd j        i: token, j: feature, D: width
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

_LONGEST_WAVE = 10000.0


def sinusoidal_positions(tokens: int, dim: int) -> Float[Tensor, "1 n dim"]:
    """Return the positions P in float32, rounded from float64."""
    columns = torch.arange(dim)
    even = columns - columns % 2
    angles = torch.arange(tokens, dtype=torch.float64)[:, None] / _LONGEST_WAVE ** (even.double() / dim)
    return torch.where(columns % 2 == 0, angles.sin(), angles.cos()).float()[None]
