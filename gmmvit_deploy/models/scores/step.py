"""Steps on attention scores, such as a scale, a mask, a bias or a head mixing.

    P = after(softmax(before(Q Kᵀ))) V        before and after are lists of steps

    multiply    S' = M ∘ S                    add         S' = S + B
    mix         S'[g] = Σ_h S[h] · W[h, g]    normalise   S'[:, i, j] = LayerNorm(S[:, i, j]), over the heads

S (B, H, N, N) is the input of a step: the scores before softmax or the weights after softmax. M, B and W do not depend
on the input of the model. Folding computes the matrix of a step once, and replaces the step by a constant of the same
role in the precision policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.inference.precision import Role

Grid = int | tuple[int, int]
"""A grid of tokens: (rows, columns), or an integer g for a g × g grid."""


def rows_and_columns(grid: Grid) -> tuple[int, int]:
    """Return (rows, columns) of a grid."""
    return (grid, grid) if isinstance(grid, int) else grid


def lattice_points(grid: Grid) -> Float[Tensor, "n 2"]:
    """Return (row, column) of each token of a grid, in float32.  The tokens are numbered row by row."""
    sides = [torch.arange(side, dtype=torch.float32) for side in rows_and_columns(grid)]
    rows, columns = torch.meshgrid(*sides, indexing="ij")
    return torch.stack([rows.flatten(), columns.flatten()], dim=1)


Operation = Literal["multiply", "add", "mix", "normalise"]
_FLAT = 1e-6  # a mask counts as constant if max − min of the entries is below this fraction of the largest |entry|


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepNumbers:
    """Values of a step for pictures and audit.  A value that the step does not have is None.

    patches: (H, N, N), (1, N, N) or (N, N), the matrix between patches, without class token.
    alpha, sigma: (K, H) or (K, 1), the parameters of a mixture of K Gaussians.
    base: (1, 1, N, N), the stored base mask, from which M is computed.  grid: (rows, columns) of the patches.
    """

    patches: Tensor | None = None
    alpha: Tensor | None = None
    sigma: Tensor | None = None
    base: Tensor | None = None
    grid: tuple[int, int] | None = None

    @property
    def kernels(self) -> int:
        """K, the number of Gaussians of the mixture; 0 for a step without a Gaussian mixture."""
        return 0 if self.alpha is None else len(self.alpha)

    @property
    def underflowed(self) -> int | None:
        """Number of zeros in the stored base mask; None without a stored base mask."""
        return None if self.base is None else int((self.base == 0).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Oddity:
    """An unusual property of a step or a checkpoint.

    severity: ``error`` makes every result meaningless, ``warning`` should be examined, ``note`` is for information.
    where: the tensor or the layer of a checkpoint, and of a step head and Gaussian, such as `` head 1 kernel 2``.
    """

    severity: Literal["error", "warning", "note"]
    where: str = ""
    what: str


class Step(nn.Module):
    """A step on attention scores.  Abstract.

    operation: how the matrix acts on the scores.  role: the role in the precision policy.
    is_constant: True if the matrix is stored, False if it is computed.
    scales_query: True if the step is applied to Q in place of Q Kᵀ, as in the released code of Swin and T2T. The two
    results are mathematically equal, but the last bits of the logits differ.
    allows_minus_infinity: True if −∞ is a valid entry of the matrix; False if −∞ is a sign of damaged weights.
    """

    operation: Operation
    role: Role
    is_constant: bool = False
    scales_query: bool = False
    allows_minus_infinity: bool = False

    def matrix(self) -> Tensor:
        """Return the matrix of this step, broadcastable to the scores.  No other function computes the matrix."""
        raise NotImplementedError

    def forward(self, scores: Tensor) -> Tensor:
        raise NotImplementedError

    def folded(self) -> Step:
        """Return a constant step with the same role and bitwise equal results.  A constant step returns itself."""
        return self if self.is_constant else Constant(self.matrix().detach().clone(), like=self)

    def after_factor(self, factor: Tensor) -> Step:
        """Return a constant step equivalent to ``factor ∘ S``, () or (H, 1, 1), followed by this step, or FoldError."""
        raise FoldError(f"a factor cannot be merged into a step of role {self.role}")

    def for_windows(self, windows: int, heads: int) -> Step:
        """Return the equivalent step for scores (B, windows · H, n, n), not (B, windows, H, n, n), or FoldError."""
        raise FoldError(
            f"cannot merge the dimensions of windows and heads: the step of role {self.role} does not support it"
        )

    def numbers(self) -> StepNumbers:
        return StepNumbers()

    def oddities(self) -> Iterator[Oddity]:
        """Yield unusual properties to examine before serving the model."""
        yield from ()

    def mistakes(self) -> Iterator[tuple[str, Step | None]]:
        """Yield (common mistake, step with it): None for a missing step, the step itself for one without effect.

        All steps of a class yield the same mistakes in the same order.
        """
        yield from ()


class Multiply(Step):
    """A step that multiplies: S' = M ∘ S.  Abstract: a subclass computes M in `matrix`."""

    operation: Operation = "multiply"

    def forward(self, scores: Tensor) -> Tensor:
        return self.matrix() * scores


class Add(Step):
    """A step that adds: S' = S + B.  Abstract: a subclass computes B in `matrix`."""

    operation: Operation = "add"
    role: Role = "score_bias"

    def forward(self, scores: Tensor) -> Tensor:
        return scores + self.matrix()


class Constant(Step):
    """A step with a stored matrix: the folded form of a step ``like`` that multiplies or adds."""

    constant: Tensor
    is_constant: bool = True

    def __init__(self, constant: Tensor, *, like: Step) -> None:
        super().__init__()
        self.operation, self.role = like.operation, like.role
        self.scales_query, self.allows_minus_infinity = like.scales_query, like.allows_minus_infinity
        self.register_buffer("constant", constant)

    def matrix(self) -> Tensor:
        return self.constant

    def forward(self, scores: Tensor) -> Tensor:
        return scores + self.constant if self.operation == "add" else self.constant * scores

    def after_factor(self, factor: Tensor) -> Step:
        if self.operation != "multiply":
            return super().after_factor(factor)
        return Constant(self.constant * factor, like=self)

    def for_windows(self, windows: int, heads: int) -> Step:
        """Return a constant (windows · H, n, n) for one of (windows, H, n, n), (H, n, n) or (n, n); () stays."""
        if self.constant.dim() == 0:
            return self
        if self.constant.dim() == 4:
            return Constant(self.constant.flatten(0, 1), like=self)
        per_head = self.constant.expand(heads, *self.constant.shape[-2:])
        return Constant(per_head.repeat(windows, 1, 1), like=self)

    def numbers(self) -> StepNumbers:
        return StepNumbers(patches=self.constant) if self.role == "mask" else StepNumbers()

    def oddities(self) -> Iterator[Oddity]:
        if self.role == "mask":
            yield from matrix_oddities(self.constant)

    def mistakes(self) -> Iterator[tuple[str, Step | None]]:
        if self.role == "mask":
            yield from matrix_mistakes(self)


def matrix_oddities(matrix: Tensor) -> Iterator[Oddity]:
    """Yield an error for NaN or infinite entries of a mask, and a warning for each head with a constant mask."""
    if not bool(matrix.isfinite().all()):
        yield Oddity(severity="error", what="the mask has NaN or infinite entries")
        return
    for head, mask in enumerate(matrix.reshape(-1, *matrix.shape[-2:])):
        size = float(mask.abs().max())
        if size == 0:
            what = "the mask is zero: all tokens get the same weight"
        elif float(mask.max() - mask.min()) < _FLAT * size:
            what = f"the mask is constant: |M| = {size:.4g}"
        else:
            continue
        yield Oddity(severity="warning", where=f" head {head}", what=what)


def matrix_mistakes(mask: Step) -> Iterator[tuple[str, Step]]:
    """Yield `Step.mistakes` of a step with a matrix (H, N, N), (1, N, N) or (N, N) that multiplies the scores."""
    matrix = mask.matrix().detach()
    for name, change in _MATRIX_MISTAKES:
        changed = change(matrix)
        yield name, mask if changed.equal(matrix) else Constant(changed, like=mask)


def _swap_first_heads(matrix: Tensor) -> Tensor:
    if matrix.ndim < 3 or matrix.shape[-3] < 2:
        return matrix
    return matrix[..., [1, 0, *range(2, matrix.shape[-3])], :, :]


_MATRIX_MISTAKES: tuple[tuple[str, Callable[[Tensor], Tensor]], ...] = (
    ("no mask at all", torch.ones_like),
    ("masks transposed", lambda m: m.transpose(-1, -2)),
    ("masks of the heads in reverse order", lambda m: m.flip(-3) if m.ndim > 2 else m),
    ("masks of the heads moved on by one", lambda m: m.roll(1, -3) if m.ndim > 2 else m),
    ("masks of the first two heads exchanged", _swap_first_heads),
    ("masks shifted by one token, down", lambda m: m.roll(1, -2)),
    ("masks shifted by one token, across", lambda m: m.roll(1, -1)),
    ("masks shifted by one token, down and across", lambda m: m.roll((1, 1), (-2, -1))),
)
