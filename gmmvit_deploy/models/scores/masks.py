"""Masks: steps that multiply the scores S (B, H, N, N) element by element with a matrix M.

    S' = M ∘ S        matrix() returns M, of shape (H, N, N), (1, N, N) or (N, N)

The paper: “Toward a Deeper Understanding: RetNet Viewed through Convolution”.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gmmvit_deploy.inference.precision import Role
from gmmvit_deploy.models.scores.step import (
    Constant,
    Grid,
    Multiply,
    Oddity,
    Step,
    StepNumbers,
    lattice_points,
    matrix_mistakes,
    matrix_oddities,
    rows_and_columns,
)
from gmmvit_deploy.models.specs import MaskSpec

SIGMA_EPS = 1e-5  # ε, which keeps the exponent 1/(σ²+ε) finite; the models were trained with this ε
_DEAD = 1e-6  # a Gaussian has no effect if |alpha| is below this fraction of the largest |alpha| of the mask


def squared_distances(grid: Grid) -> Float[Tensor, "n n"]:
    """Return d²[i,j], the squared distance between tokens i and j of a grid, in float32, which is exact here."""
    points = lattice_points(grid)
    offsets = points[:, None, :] - points[None, :, :]
    return offsets.square().sum(-1)


def stored_base(grid: Grid) -> Float[Tensor, "1 1 n n"]:
    """Return the base mask base[i,j] = sqrt(exp(−d²)) in float32, as the paper authors' checkpoints store it.

    The order of operations matters: before the root is taken, exp(−d²) is subnormal for d² ≥ 88 and zero for d² ≥ 104.
    The paper authors' models were trained with these zeros.
    The float32 exponential differs between processors in the last bit, so exp is computed in float64 and rounded once.
    """
    return torch.exp(-squared_distances(grid).double()).float().sqrt()[None, None]


def stored_base_limits(grid: Grid) -> Float[Tensor, "1 1 n n"]:
    """Return the largest difference from `stored_base` that a float32 exp and sqrt of any processor may cause, float64.

    exp may be off by two units in the last place, which are 2⁻¹⁴⁹ where exp(−d²) is subnormal, and the root by one.
    Where exp(−d²) is below a quarter of 2⁻¹⁴⁹, every processor gives zero; one that flushes subnormals is beyond them.
    """
    exact = torch.exp(-squared_distances(grid).double())
    unit = (exact * 2.0**-23).clamp_min(2.0**-149)
    root = exact.sqrt()
    above = (exact + 2 * unit).sqrt() - root
    below = root - (exact - 2 * unit).clamp_min(0).sqrt()
    limits = above.maximum(below) + root * 2.0**-23
    return torch.where(exact < 2.0**-151, 0.0, limits)[None, None]


class Mask(Multiply):
    """A step that multiplies each entry of the scores by a separate factor.  Abstract."""

    role: Role = "mask"

    def other_forms(self) -> Iterator[tuple[str, Mask]]:
        """Yield (description of the mistake, mask) for each formula that is easily taken for the right formula."""
        yield from ()

    def numbers(self) -> StepNumbers:
        return StepNumbers(patches=self.matrix().detach())

    def oddities(self) -> Iterator[Oddity]:
        yield from matrix_oddities(self.matrix().detach())

    def mistakes(self) -> Iterator[tuple[str, Step | None]]:
        matrix = self.matrix().detach()
        for name, form in self.other_forms():
            yield name, self if form.matrix().equal(matrix) else form
        yield from matrix_mistakes(self)


class GaussianMask(Mask):
    """A mixture of K Gaussians of the distances between tokens.  Abstract.

    alpha, sigma: (K, H, 1, 1), the weight and the width of each Gaussian; (K, 1, 1, 1) if all heads share a mask.
    grid: of the N tokens.
    """

    def __init__(self, alpha: Tensor, sigma: Tensor, grid: Grid) -> None:
        super().__init__()
        self.grid = rows_and_columns(grid)
        self.alpha = nn.Parameter(alpha)
        self.sigma = nn.Parameter(sigma)

    def numbers(self) -> StepNumbers:
        return StepNumbers(
            patches=self.matrix().detach(),
            alpha=self.alpha.detach()[..., 0, 0],
            sigma=self.sigma.detach()[..., 0, 0],
            grid=self.grid,
        )


class GaussianMixtureMask(GaussianMask):
    """A Gaussian mixture mask: M[h,i,j] = Σ_k alpha[k,h] · base[i,j] ** (1 / (sigma[k,h]² + 1e-5)).

    base: (1, 1, N, N), the stored base mask, as in `stored_base` until a checkpoint is loaded.
    Source: equation 1 of the paper, computed from a stored base mask as in the paper authors' released code.
    """

    base: Tensor

    def __init__(self, alpha: Tensor, sigma: Tensor, grid: Grid) -> None:
        super().__init__(alpha, sigma, grid)
        self.register_buffer("base", stored_base(grid))

    def matrix(self) -> Float[Tensor, "heads n n"]:
        exponent = 1 / (self.sigma**2 + SIGMA_EPS)
        return (self.alpha * self.base**exponent).sum(dim=0)

    def numbers(self) -> StepNumbers:
        return replace(super().numbers(), base=self.base)

    def other_forms(self) -> Iterator[tuple[str, Mask]]:
        closed = ClosedFormGaussianMask(self.alpha.detach(), self.sigma.detach(), self.grid)
        yield "the closed-form Gaussian mask in place of the stored base's", closed

    def oddities(self) -> Iterator[Oddity]:
        alpha, sigma = self.alpha.detach()[..., 0, 0], self.sigma.detach()[..., 0, 0]
        # At distance 1, a Gaussian is exp(−1/(2(σ²+ε))). A neighbour counts as without influence if the Gaussian is
        # below 1e-4 there; ln(1e-4) = −9.21.
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
    """A Gaussian mixture mask: M[h,i,j] = Σ_k alpha[k,h] · exp(−d²[i,j] / (2·sigma[k,h]² + 2e-5)).

    M is equation 1 of the paper, computed from the distances, without the underflow of a stored base mask. Only for
    models that were trained with this formula.  distances: (N, N), the squared distances d².
    """

    distances: Tensor

    def __init__(self, alpha: Tensor, sigma: Tensor, grid: Grid) -> None:
        super().__init__(alpha, sigma, grid)
        # The distances follow from the grid. They are computed again at loading, and the state dict omits them.
        self.register_buffer("distances", squared_distances(grid), persistent=False)

    def matrix(self) -> Float[Tensor, "heads n n"]:
        width = 2 * self.sigma**2 + 2 * SIGMA_EPS
        return (self.alpha * torch.exp(-self.distances / width)).sum(dim=0)


class ElementwiseMask(Mask):
    """An elementwise learnable mask (ELM), which all heads share: M = weight (N, N).  The released code calls it SLM.

    grid: the grid of the N tokens; None for a square grid.
    """

    def __init__(self, weight: Float[Tensor, "n n"], *, grid: Grid | None = None) -> None:
        super().__init__()
        self.grid = rows_and_columns(math.isqrt(len(weight)) if grid is None else grid)
        self.weight = nn.Parameter(weight)

    def matrix(self) -> Float[Tensor, "n n"]:
        return self.weight

    def numbers(self) -> StepNumbers:
        return replace(super().numbers(), grid=self.grid)


class PrefixMask(Mask):
    """A mask between the N patches; the P prefix tokens stay unmasked: M = [[1, 1], [1, patches]], (…, P+N, P+N).

    Prefix tokens stand before the patches: a class token, a distillation token, registers.
    """

    def __init__(self, patches: Mask, prefix: int = 1) -> None:
        super().__init__()
        self.patches = patches
        self.prefix = prefix

    def matrix(self) -> Tensor:
        return nn.functional.pad(self.patches.matrix(), (self.prefix, 0, self.prefix, 0), value=1.0)

    def numbers(self) -> StepNumbers:
        return self.patches.numbers()

    def oddities(self) -> Iterator[Oddity]:
        yield from self.patches.oddities()

    def other_forms(self) -> Iterator[tuple[str, Mask]]:
        for name, patches in self.patches.other_forms():
            yield name, PrefixMask(patches, self.prefix)

    def mistakes(self) -> Iterator[tuple[str, Step | None]]:
        yield from super().mistakes()
        if self.prefix == 1:
            rows_name, both_name = "the class token's row", "the class token's row and column"
        else:
            rows_name, both_name = "the rows of the prefix tokens", "the rows and columns of the prefix tokens"
        rows = self.matrix().detach().clone()
        rows[..., : self.prefix, self.prefix :] = 0
        yield f"{rows_name} masked with zeros", Constant(rows, like=self)
        both = rows.clone()
        both[..., : self.prefix] = 0
        yield f"{both_name} masked with zeros", Constant(both, like=self)


def mask_from_spec(mask: MaskSpec, *, heads: int, grid: Grid) -> Mask | None:
    """Return a mask with random weights, or None if the spec is ``plain``, which means no mask.

    The Gaussians of a mixture start with different widths, up to the longer side of the grid.
    """
    if mask.kind == "plain":
        return None
    rows, columns = rows_and_columns(grid)
    tokens = rows * columns
    if mask.kind == "elm":
        return ElementwiseMask(torch.ones(tokens, tokens) + 0.02 * torch.randn(tokens, tokens), grid=grid)
    shape = (mask.kernels, 1 if mask.shared else heads, 1, 1)
    alpha = 1.0 / mask.kernels + 0.1 * torch.randn(shape)
    # The device is stated: after transformers' from_pretrained, linspace may ignore ``with torch.device("meta")``.
    widths = torch.linspace(1.0, float(max(rows, columns)), mask.kernels, device=alpha.device).reshape(-1, 1, 1, 1)
    sigma = widths.expand(shape) * (1 + 0.1 * torch.randn(shape))
    if mask.closed_form:
        return ClosedFormGaussianMask(alpha, sigma, grid)
    return GaussianMixtureMask(alpha, sigma, grid)
