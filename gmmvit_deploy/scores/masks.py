"""Masks: steps that multiply the scores S (B, H, N, N) element by element with a matrix M.

    S' = M ∘ S        matrix() = M, of shape (H, N, N), (1, N, N) or (N, N)

Only ``matrix()`` computes a mask, and folding stores its result as a constant: the served mask equals the trained mask
bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gmmvit_deploy.precision import Role
from gmmvit_deploy.scores.mistakes import matrix_mistakes
from gmmvit_deploy.scores.step import Constant, Multiply, Oddity, Step, StepNumbers, matrix_oddities
from gmmvit_deploy.specs import MaskSpec

__all__ = [
    "SIGMA_EPS",
    "ClassTokenMask",
    "ClosedFormGaussianMask",
    "ElementwiseMask",
    "GaussianMask",
    "GaussianMixtureMask",
    "Mask",
    "mask_from_spec",
    "squared_distances",
    "stored_base",
]

SIGMA_EPS = 1e-5  # keeps the exponent 1/(σ²+ε) finite; part of the trained function
_DEAD = 1e-6  # a kernel has no effect if its |alpha| is below this fraction of the largest |alpha|


def squared_distances(grid: int) -> Float[Tensor, "n n"]:
    """Return d²[i,j] between tokens i and j of a grid × grid lattice, row by row; float32, exact."""
    coordinates = torch.arange(grid, dtype=torch.float32)
    rows, columns = torch.meshgrid(coordinates, coordinates, indexing="ij")
    points = torch.stack([rows.flatten(), columns.flatten()], dim=1)
    offsets = points[:, None, :] - points[None, :, :]
    return offsets.square().sum(-1)


def stored_base(grid: int) -> Float[Tensor, "1 1 n n"]:
    """Return base[i,j] = sqrt(exp(−d²)) in float32, as released checkpoints store the base mask.

    The order of operations matters: before the root is taken, exp(−d²) is subnormal from d² = 88 on and zero from
    d² = 104 on. The networks were trained with these zeros.
    """
    return torch.sqrt(torch.exp(-squared_distances(grid)))[None, None]


class Mask(Multiply):
    """A step that multiplies each entry of the scores by a separate factor.  Abstract."""

    role: Role = "mask"

    def other_forms(self) -> Iterator[tuple[str, Mask]]:
        """Yield (mistake in words, mask computed with another formula that is easily taken for the right formula)."""
        yield from ()

    def numbers(self) -> StepNumbers:
        return StepNumbers(patches=self.matrix().detach())

    def oddities(self) -> Iterator[Oddity]:
        yield from matrix_oddities(self.matrix().detach())

    def mistakes(self) -> Iterator[tuple[str, Step | None]]:
        matrix = self.matrix().detach()
        for name, form in self.other_forms():
            yield name, self if form.matrix().equal(matrix) else form
        for name, changed in matrix_mistakes(matrix):
            yield name, self if changed.equal(matrix) else Constant(changed, like=self)


class GaussianMask(Mask):
    """A mixture of Gaussians over token distances.  Abstract.  alpha and sigma: (K, H, 1, 1) or (K, 1, 1, 1)."""

    alpha: nn.Parameter
    sigma: nn.Parameter

    def numbers(self) -> StepNumbers:
        return StepNumbers(
            patches=self.matrix().detach(),
            alpha=self.alpha.detach()[..., 0, 0],
            sigma=self.sigma.detach()[..., 0, 0],
        )


class GaussianMixtureMask(GaussianMask):
    """M[h,i,j] = Σ_k alpha[k,h] · base[i,j] ** (1 / (sigma[k,h]² + 1e-5)).

    Shapes: alpha and sigma (K, H, 1, 1), or (K, 1, 1, 1) when all heads share a mask; base
    (1, 1, N, N).  Source: the paper, equation 1, as its released checkpoints compute it.
    """

    base: Tensor

    def __init__(self, alpha: Tensor, sigma: Tensor, base: Float[Tensor, "1 1 n n"]) -> None:
        super().__init__()
        self.alpha = nn.Parameter(alpha)
        self.sigma = nn.Parameter(sigma)
        self.register_buffer("base", base)

    def matrix(self) -> Float[Tensor, "heads n n"]:
        exponent = 1 / (self.sigma**2 + SIGMA_EPS)
        return (self.alpha * self.base**exponent).sum(dim=0)

    def numbers(self) -> StepNumbers:
        return replace(super().numbers(), base=self.base)

    def other_forms(self) -> Iterator[tuple[str, Mask]]:
        grid = round(self.base.shape[-1] ** 0.5)
        closed = ClosedFormGaussianMask(self.alpha.detach(), self.sigma.detach(), squared_distances(grid))
        yield "the closed-form Gaussian mask in place of the stored base's", closed

    def oddities(self) -> Iterator[Oddity]:
        alpha, sigma = self.alpha.detach()[..., 0, 0], self.sigma.detach()[..., 0, 0]
        # At distance 1 the kernel is exp(−1/(2(σ²+ε))). Below 1e-4 a neighbour has no influence; ln(1e-4) = −9.21.
        narrow = (sigma.square() + SIGMA_EPS) * 2 * 9.21 < 1
        dead = alpha.abs() < _DEAD * alpha.abs().amax().clamp_min(1e-30)
        for kernel, head in narrow.nonzero().tolist():
            what = f"sigma is {float(sigma[kernel, head]):.3g}: through this kernel a token attends only to itself"
            yield Oddity(severity="warning", where=f" head {head} kernel {kernel}", what=what)
        for kernel, head in dead.nonzero().tolist():
            what = f"alpha is {float(alpha[kernel, head]):.3g}: the kernel has no effect"
            yield Oddity(severity="warning", where=f" head {head} kernel {kernel}", what=what)
        yield from super().oddities()


class ClosedFormGaussianMask(GaussianMask):
    """M[h,i,j] = Σ_k alpha[k,h] · exp(−d²[i,j] / (2·sigma[k,h]² + 2e-5)).

    This is the paper's formula, evaluated from the distances, without the underflow of a stored base. Only models
    that were trained with this formula use this class.
    Shapes: alpha and sigma as in `GaussianMixtureMask`; distances (N, N).
    """

    distances: Tensor

    def __init__(self, alpha: Tensor, sigma: Tensor, distances: Float[Tensor, "n n"]) -> None:
        super().__init__()
        self.alpha = nn.Parameter(alpha)
        self.sigma = nn.Parameter(sigma)
        # The distances follow from the grid: they are rebuilt, and are not part of the trained state.
        self.register_buffer("distances", distances, persistent=False)

    def matrix(self) -> Float[Tensor, "heads n n"]:
        width = 2 * self.sigma**2 + 2 * SIGMA_EPS
        return (self.alpha * torch.exp(-self.distances / width)).sum(dim=0)


class ElementwiseMask(Mask):
    """M = weight (N, N): all heads share a matrix whose every entry is trained (SLM in the released code)."""

    def __init__(self, weight: Float[Tensor, "n n"]) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def matrix(self) -> Float[Tensor, "n n"]:
        return self.weight


class ClassTokenMask(Mask):
    """A mask on the patch–patch scores.  The class token is the first token; its row and column stay unmasked.

    M = [[1, 1], [1, M_patches]], of shape (H, N+1, N+1).
    """

    def __init__(self, patches: Mask) -> None:
        super().__init__()
        self.patches = patches

    def matrix(self) -> Tensor:
        return nn.functional.pad(self.patches.matrix(), (1, 0, 1, 0), value=1.0)

    def numbers(self) -> StepNumbers:
        return self.patches.numbers()

    def oddities(self) -> Iterator[Oddity]:
        yield from self.patches.oddities()

    def other_forms(self) -> Iterator[tuple[str, Mask]]:
        for name, patches in self.patches.other_forms():
            yield name, ClassTokenMask(patches)

    def mistakes(self) -> Iterator[tuple[str, Step | None]]:
        yield from super().mistakes()
        row = self.matrix().detach().clone()
        row[..., 0, 1:] = 0
        yield "the class token's row masked with zeros", Constant(row, like=self)
        both = row.clone()
        both[..., 0] = 0
        yield "the class token's row and column masked with zeros", Constant(both, like=self)


def mask_from_spec(mask: MaskSpec, *, heads: int, grid: int) -> Mask | None:
    """Return a mask with fresh weights, or None for a plain model.  The kernels of a Gaussian mixture differ in width.

    heads: H, the number of heads of the attention.  grid: the number of patches along a side of the image.
    """
    if mask.kind == "plain":
        return None
    tokens = grid**2
    if mask.kind == "elm":
        return ElementwiseMask(torch.ones(tokens, tokens) + 0.02 * torch.randn(tokens, tokens))
    shape = (mask.kernels, 1 if mask.shared else heads, 1, 1)
    alpha = 1.0 / mask.kernels + 0.1 * torch.randn(shape)
    widths = torch.linspace(1.0, float(grid), mask.kernels).reshape(-1, 1, 1, 1)
    sigma = widths.expand(shape) * (1 + 0.1 * torch.randn(shape))
    if mask.closed_form:
        return ClosedFormGaussianMask(alpha, sigma, squared_distances(grid))
    return GaussianMixtureMask(alpha, sigma, stored_base(grid))
