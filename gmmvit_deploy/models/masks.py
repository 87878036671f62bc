"""Masks on attention scores.

A mask is a module that multiplies the scores S (B, H, N, N) element by element with a matrix M
that does not depend on the input:

    forward(S) = M ∘ S        matrix() = M, of shape (H, N, N), (1, N, N) or (N, N)

Folding replaces the module by a `ConstantMask` that holds ``matrix()``, so ``matrix()`` is the one
place where a mask is computed: what is served is bit for bit what was trained.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gmmvit_deploy.specs import MaskSpec

__all__ = [
    "SIGMA_EPS",
    "ClassTokenMask",
    "ClosedFormGaussianMask",
    "ConstantMask",
    "ElementwiseMask",
    "GaussianMixtureMask",
    "Mask",
    "mask_from_spec",
    "squared_distances",
    "stored_base",
]

SIGMA_EPS = 1e-5  # keeps the exponent 1/(σ²+ε) finite; part of the trained function


def squared_distances(grid: int) -> Float[Tensor, "n n"]:
    """d²[i,j] between tokens i and j on a grid × grid lattice, row by row; float32, exact."""
    coordinates = torch.arange(grid, dtype=torch.float32)
    rows, columns = torch.meshgrid(coordinates, coordinates, indexing="ij")
    points = torch.stack([rows.flatten(), columns.flatten()], dim=1)
    offsets = points[:, None, :] - points[None, :, :]
    return offsets.square().sum(-1)


def stored_base(grid: int) -> Float[Tensor, "1 1 n n"]:
    """base[i,j] = sqrt(exp(−d²)) in float32, as released checkpoints store it.

    The order of operations is the point: exp(−d²) is subnormal from d² = 88 on and zero from
    d² = 104 on, before the root is taken. Networks were trained with those zeros.
    """
    return torch.sqrt(torch.exp(-squared_distances(grid)))[None, None]


class Mask(nn.Module):
    """A constant factor on attention scores.  Abstract."""

    def matrix(self) -> Tensor:
        """M, broadcastable over (H, N, N)."""
        raise NotImplementedError

    def forward(self, scores: Float[Tensor, "batch heads n n"]) -> Float[Tensor, "batch heads n n"]:
        return self.matrix() * scores


class GaussianMixtureMask(Mask):
    """M[h,i,j] = Σ_k alpha[k,h] · base[i,j] ** (1 / (sigma[k,h]² + 1e-5)).

    Shapes: alpha and sigma (K, H, 1, 1), or (K, 1, 1, 1) when all heads share one mask; base
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


class ClosedFormGaussianMask(Mask):
    """M[h,i,j] = Σ_k alpha[k,h] · exp(−d²[i,j] / (2·sigma[k,h]² + 2e-5)).

    The paper's formula, evaluated from distances: nothing underflows before its time. Only for
    models that were trained with it.  Shapes as in `GaussianMixtureMask`, distances (N, N).
    """

    distances: Tensor

    def __init__(self, alpha: Tensor, sigma: Tensor, distances: Float[Tensor, "n n"]) -> None:
        super().__init__()
        self.alpha = nn.Parameter(alpha)
        self.sigma = nn.Parameter(sigma)
        # Follows from the grid, so it is rebuilt and not part of the trained state.
        self.register_buffer("distances", distances, persistent=False)

    def matrix(self) -> Float[Tensor, "heads n n"]:
        width = 2 * self.sigma**2 + 2 * SIGMA_EPS
        return (self.alpha * torch.exp(-self.distances / width)).sum(dim=0)


class ElementwiseMask(Mask):
    """M = weight (N, N), every entry learned, shared by all heads (the released code's SLM)."""

    def __init__(self, weight: Float[Tensor, "n n"]) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def matrix(self) -> Float[Tensor, "n n"]:
        return self.weight


class ClassTokenMask(Mask):
    """A mask on patch–patch scores; the class token, first, keeps its row and column as they are.

    M = [[1, 1], [1, M_patches]], of shape (H, N+1, N+1).
    """

    def __init__(self, patches: Mask) -> None:
        super().__init__()
        self.patches = patches

    def matrix(self) -> Tensor:
        return nn.functional.pad(self.patches.matrix(), (1, 0, 1, 0), value=1.0)


class ConstantMask(Mask):
    """M = constant: what folding leaves behind."""

    constant: Tensor

    def __init__(self, constant: Tensor) -> None:
        super().__init__()
        self.register_buffer("constant", constant)

    def matrix(self) -> Tensor:
        return self.constant


def mask_from_spec(mask: MaskSpec, *, heads: int, grid: int) -> Mask | None:
    """A mask to train: broad, positive and different in every kernel.  None for a plain model.

    heads: H of the attention; grid: patches along one side.
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
