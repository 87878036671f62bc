"""A step on attention scores.

    P = after(softmax(before(Q Kᵀ))) V        before and after are lists of steps

    multiply    S' = M ∘ S                    add         S' = S + B
    mix         S'[g] = Σ_h S[h] · W[h, g]    normalise   over the heads of each entry

M, B and W do not depend on the input. A step knows its matrix, its role in the precision policy, its numbers for
pictures and audit, and the mistakes usually made with it. Folding replaces it by a constant of the same role.
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
_FLAT = 1e-6  # a head whose mask varies less than this relative to its size multiplies by a constant


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepNumbers:
    """What pictures and audit ask of a step; None where a step has no such number.

    patches: the matrix over the patch grid, without class token (H, N, N) or (N, N): what is drawn.
    alpha, sigma: of a Gaussian mixture, (K, H).  base: the stored base, (1, 1, N, N).
    """

    patches: Tensor | None = None
    alpha: Tensor | None = None
    sigma: Tensor | None = None
    base: Tensor | None = None

    @property
    def kernels(self) -> int:
        """K; 0 for a step that is no mixture."""
        return 0 if self.alpha is None else len(self.alpha)

    @property
    def underflowed(self) -> int | None:
        """Entries of the stored base that are zero; None where there is no stored base."""
        return None if self.base is None else int((self.base == 0).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Oddity:
    """What is odd about a step.  where: the head and kernel, as `` head 1 kernel 2``; empty for the whole step."""

    severity: Literal["error", "warning", "note"]
    what: str
    where: str = ""


class Step(nn.Module):
    """A step on attention scores.  Abstract.

    role: the word of the precision policy.  is_constant: nothing is computed before it is applied.
    scales_query: applied to Q in place of Q Kᵀ, as some released code does. The formula is the same, the last bits
    of the logits are not.
    allows_minus_infinity: −∞ is an entry on purpose, and no sign of damage.
    """

    operation: Operation
    role: Role
    is_constant: bool = False
    scales_query: bool = False
    allows_minus_infinity: bool = False

    def matrix(self) -> Tensor:
        """The constant of this step, broadcastable over the scores: the one place where it is computed."""
        raise NotImplementedError

    def forward(self, scores: Tensor) -> Tensor:
        raise NotImplementedError

    def folded(self) -> Step:
        """A constant step of the same role that does the same, bit for bit; itself if it is constant."""
        raise NotImplementedError

    def after_factor(self, factor: Tensor) -> Step:
        """The constant step that does in one what ``factor ∘ S`` and then this step do.

        factor: a scalar, or (H, 1, 1).  Errors: FoldError when there is no such step.
        """
        raise FoldError(f"a factor cannot be merged into a step of role {self.role}")

    def for_windows(self, windows: int, heads: int) -> Step:
        """The step on scores (B, windows · H, n, n), index w·H + h, in place of (B, windows, H, n, n).

        Errors: FoldError when there is no such step.
        """
        raise FoldError(f"windows cannot be joined with a step of role {self.role} in between")

    def numbers(self) -> StepNumbers:
        return StepNumbers()

    def oddities(self) -> Iterator[Oddity]:
        """What deserves a look before anybody serves it."""
        yield from ()

    def mistakes(self) -> Iterator[tuple[str, Step | None]]:
        """(mistake in words, the step with it; None for leaving the step out).

        A step yields every mistake of its kind, in the same order: itself where a mistake changes nothing.
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
    """A step whose matrix is stored: what folding leaves of a step that multiplies or adds.

    like: the step in whose place it stands; it has that step's operation and role.
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
    """A mask that is not finite, zero or the same everywhere."""
    if not bool(matrix.isfinite().all()):
        yield Oddity(severity="error", what="its mask holds NaN or infinite entries")
        return
    for head, mask in enumerate(matrix.reshape(-1, *matrix.shape[-2:])):
        size = float(mask.abs().max())
        if size == 0:
            yield Oddity(severity="warning", where=f" head {head}", what="its mask is zero: the head averages")
        elif float(mask.max() - mask.min()) < _FLAT * size:
            yield Oddity(severity="warning", where=f" head {head}", what=f"its mask is constant ({size:.4g})")
