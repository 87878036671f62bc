"""A step on attention scores.

    P = after(softmax(before(Q Kᵀ))) V        before and after are lists of steps

    multiply    S' = M ∘ S                    add         S' = S + B
    mix         S'[g] = Σ_h S[h] · W[h, g]    normalise   over the heads of each entry

M, B and W do not depend on the input. A step provides its matrix, its role in the precision policy, its values for
pictures and audit, and the usual mistakes with it. Folding replaces it by a constant of the same role.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.precision import Role
from gmmvit_deploy.scores.mistakes import matrix_mistakes

__all__ = ["Add", "Constant", "Multiply", "Oddity", "Operation", "Step", "StepNumbers", "matrix_oddities"]

Operation = Literal["multiply", "add", "mix", "normalise"]
_FLAT = 1e-6  # a mask that varies by less than this fraction of its largest |entry| is constant


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepNumbers:
    """Values of a step for pictures and audit; None where the step does not have the value.

    patches: the matrix over the patch grid without class token, for drawing, (H, N, N) or (N, N).
    alpha, sigma: of a Gaussian mixture, (K, H).  base: the stored base, (1, 1, N, N).
    """

    patches: Tensor | None = None
    alpha: Tensor | None = None
    sigma: Tensor | None = None
    base: Tensor | None = None

    @property
    def kernels(self) -> int:
        """K, or 0 for a step without a mixture."""
        return 0 if self.alpha is None else len(self.alpha)

    @property
    def underflowed(self) -> int | None:
        """Number of zeros in the stored base; None without a stored base."""
        return None if self.base is None else int((self.base == 0).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Oddity:
    """An unusual property of a step.  where: head and kernel, as `` head 1 kernel 2``; empty for the whole step."""

    severity: Literal["error", "warning", "note"]
    what: str
    where: str = ""


class Step(nn.Module):
    """A step on attention scores.  Abstract.

    role: in the precision policy.  is_constant: the matrix is stored, not computed.
    scales_query: applied to Q in place of Q Kᵀ, as in some released code. The formula is the same, but the last bits
    of the logits differ.
    allows_minus_infinity: −∞ is a valid entry, not a sign of damage.
    """

    operation: Operation
    role: Role
    is_constant: bool = False
    scales_query: bool = False
    allows_minus_infinity: bool = False

    def matrix(self) -> Tensor:
        """Compute the matrix of this step, broadcastable over the scores.  Nothing else computes it."""
        raise NotImplementedError

    def forward(self, scores: Tensor) -> Tensor:
        raise NotImplementedError

    def folded(self) -> Step:
        """Return a constant step of the same role with the same results bit for bit; itself if it is constant."""
        raise NotImplementedError

    def after_factor(self, factor: Tensor) -> Step:
        """Return a constant step equivalent to ``factor ∘ S`` followed by this step.

        factor: a scalar, or (H, 1, 1).  Errors: FoldError when no equivalent step exists.
        """
        raise FoldError(f"a factor cannot be merged into a step of role {self.role}")

    def for_windows(self, windows: int, heads: int) -> Step:
        """Return the equivalent step on (B, windows · H, n, n), index w·H + h, in place of (B, windows, H, n, n).

        Errors: FoldError when no equivalent step exists.
        """
        raise FoldError(f"windows cannot be joined with a step of role {self.role} in between")

    def numbers(self) -> StepNumbers:
        return StepNumbers()

    def oddities(self) -> Iterator[Oddity]:
        """Yield unusual properties to examine before serving the model."""
        yield from ()

    def mistakes(self) -> Iterator[tuple[str, Step | None]]:
        """Yield (mistake in words, the step with the mistake; None for omitting the step).

        Steps of a kind yield the same mistakes in the same order, the step itself where a mistake changes nothing.
        """
        yield from ()


class Multiply(Step):
    """S' = M ∘ S.  Abstract: `matrix` gives M."""

    operation: Operation = "multiply"

    def forward(self, scores: Tensor) -> Tensor:
        return self.matrix() * scores

    def folded(self) -> Step:
        return Constant(self.matrix().detach().clone(), like=self)


class Add(Step):
    """S' = S + B.  Abstract: `matrix` gives B."""

    operation: Operation = "add"
    role: Role = "score_bias"

    def forward(self, scores: Tensor) -> Tensor:
        return scores + self.matrix()

    def folded(self) -> Step:
        return Constant(self.matrix().detach().clone(), like=self)


class Constant(Step):
    """A step with a stored matrix: the folded form of a step that multiplies or adds.

    like: the step that it replaces, whose operation and role it takes over.
    """

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

    def folded(self) -> Step:
        return self

    def after_factor(self, factor: Tensor) -> Step:
        if self.operation != "multiply":
            return super().after_factor(factor)
        return Constant(self.constant * factor, like=self)

    def for_windows(self, windows: int, heads: int) -> Step:
        """(windows, H, n, n), (H, n, n) or (n, n)  →  (windows · H, n, n); a scalar stays."""
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
            for name, changed in matrix_mistakes(self.constant):
                yield name, self if changed.equal(self.constant) else Constant(changed, like=self)


def matrix_oddities(matrix: Tensor) -> Iterator[Oddity]:
    """Report a mask with NaN or infinite entries, and heads whose mask is zero or constant."""
    if not bool(matrix.isfinite().all()):
        yield Oddity(severity="error", what="its mask holds NaN or infinite entries")
        return
    for head, mask in enumerate(matrix.reshape(-1, *matrix.shape[-2:])):
        size = float(mask.abs().max())
        if size == 0:
            yield Oddity(severity="warning", where=f" head {head}", what="its mask is zero: the head averages")
        elif float(mask.max() - mask.min()) < _FLAT * size:
            yield Oddity(severity="warning", where=f" head {head}", what=f"its mask is constant ({size:.4g})")
