"""Steps that change only the diagonal of the scores: the score of each token with itself.

    add        S'[i, i] = S[i, i] + value       with value = −∞, or a finite number with the same effect in softmax
    multiply   S'[i, i] = 0                     with M = 1 − I; the token still attends to itself

Source: locality self-attention (LSA). CaiT with LSA multiplies, because −∞ before head mixing would give NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from gmmvit_deploy.inference.precision import Role
from gmmvit_deploy.models.scores.step import Add, Multiply, Step

_MISSING = "the diagonal not masked"
_LARGE = -987654321.0  # LSA's released code puts this number on the diagonal in its ViT


class MaskedDiagonal(Add):
    """A bias B that is ``value`` on the diagonal and 0 elsewhere.

    value: −∞, or a large negative number such as −987654321.

    The released code of LSA overwrites the diagonal of the scores with the value. Adding and overwriting give the same
    attention weights, because the weights on the diagonal are exactly 0 after softmax.
    """

    masked: Tensor

    def __init__(self, tokens: int, value: float = -math.inf) -> None:
        super().__init__()
        self.allows_minus_infinity = value == -math.inf
        # B follows from the number of tokens. B is computed again at loading, and the state dict omits B.
        self.register_buffer("masked", torch.zeros(tokens, tokens).fill_diagonal_(value), persistent=False)

    def matrix(self) -> Float[Tensor, "n n"]:
        return self.masked

    def mistakes(self) -> Iterator[tuple[str, Step | None]]:
        yield _MISSING, None


class ZeroDiagonal(Multiply):
    """A mask M = 1 − I: the score of each token with itself becomes 0.

    heads: H, for a mask (H, N, N) with a copy for each head, the form that the CPU kernel takes; None for (N, N).
    """

    role: Role = "mask"
    kept: Tensor

    def __init__(self, tokens: int, *, heads: int | None = None) -> None:
        super().__init__()
        kept = torch.ones(tokens, tokens).fill_diagonal_(0)
        copies = kept if heads is None else kept.repeat(heads, 1, 1)
        self.register_buffer("kept", copies, persistent=False)

    def matrix(self) -> Float[Tensor, "*heads n n"]:
        return self.kept

    def mistakes(self) -> Iterator[tuple[str, Step | None]]:
        yield _MISSING, None
        yield "a large negative number on the diagonal in place of 0", MaskedDiagonal(self.kept.shape[-1], _LARGE)
