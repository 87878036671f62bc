"""What is odd about a checkpoint, before anybody serves it.

Nothing here stops a load but what makes the answer meaningless (NaN and infinities); the rest is
said and left to judgement, each with the layer, head and kernel it is about.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gmmvit_deploy.models.masks import SIGMA_EPS, GaussianMixtureMask, Mask, stored_base

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gmmvit_deploy.specs import ModelSpec

__all__ = ["Finding", "audit_model", "audit_tensors"]

_SMALLEST_NORMAL = 2.0**-126  # float32
_FLAT = 1e-6  # a head whose mask varies less than this relative to its size multiplies by a constant
_DEAD = 1e-6  # a kernel that adds less than this relative to the largest does nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """severity ``error`` spoils the answers, ``warning`` deserves a look, ``note`` is for the record."""

    severity: Literal["error", "warning", "note"]
    where: str
    what: str


def audit_tensors(tensors: Mapping[str, Tensor], used: set[str]) -> Iterator[Finding]:
    """Values that are not finite: an error in a tensor that the model uses, a warning elsewhere."""
    for name, tensor in tensors.items():
        bad = int((~tensor.isfinite()).sum())
        if bad:
            yield Finding(
                severity="error" if name in used else "warning",
                where=name,
                what=f"{bad} of {tensor.numel()} values are NaN or infinite",
            )


def audit_model(model: nn.Module, spec: ModelSpec, root_base: Tensor | None) -> list[Finding]:
    """Look at every mask of a loaded model.

    root_base: the unused base at the root of a released file, to be compared with those in use.
    """
    findings: list[Finding] = []
    masks = {name: module for name, module in model.named_modules() if isinstance(module, Mask)}
    for name, mask in masks.items():
        layer = name.removesuffix(".attention.mask")
        if isinstance(mask, GaussianMixtureMask):
            findings += _audit_mixture(layer, mask)
        findings += _audit_matrix(layer, mask.matrix().detach())
    bases = {name: mask.base for name, mask in masks.items() if isinstance(mask, GaussianMixtureMask)}
    findings += _audit_bases(bases, spec.grid, root_base)
    return findings


def _audit_matrix(layer: str, matrix: Tensor) -> Iterator[Finding]:
    if not bool(matrix.isfinite().all()):
        yield Finding(severity="error", where=layer, what="its mask holds NaN or infinite entries")
        return
    for head, mask in enumerate(matrix.reshape(-1, *matrix.shape[-2:])):
        size = float(mask.abs().max())
        if size == 0:
            yield Finding(severity="warning", where=f"{layer} head {head}", what="its mask is zero: the head averages")
        elif float(mask.max() - mask.min()) < _FLAT * size:
            yield Finding(severity="warning", where=f"{layer} head {head}", what=f"its mask is constant ({size:.4g})")


def _audit_mixture(layer: str, mask: GaussianMixtureMask) -> Iterator[Finding]:
    alpha, sigma = mask.alpha.detach()[..., 0, 0], mask.sigma.detach()[..., 0, 0]
    # At distance 1 the kernel has fallen to exp(−1/(2σ²)): below 1e-4 it reaches no neighbour.
    narrow = (sigma.square() + SIGMA_EPS) * 2 * 9.21 < 1
    dead = alpha.abs() < _DEAD * alpha.abs().amax().clamp_min(1e-30)
    for kernel, head in narrow.nonzero().tolist():
        yield Finding(
            severity="warning",
            where=f"{layer} head {head} kernel {kernel}",
            what=f"sigma is {float(sigma[kernel, head]):.3g}: a token sees only itself through it",
        )
    for kernel, head in dead.nonzero().tolist():
        yield Finding(
            severity="warning",
            where=f"{layer} head {head} kernel {kernel}",
            what=f"alpha is {float(alpha[kernel, head]):.3g}: the kernel is dead",
        )


def _audit_bases(bases: Mapping[str, Tensor], grid: int, root_base: Tensor | None) -> Iterator[Finding]:
    if not bases:
        return
    first_name, first = next(iter(bases.items()))
    for name, base in bases.items():
        if not base.equal(first):
            yield Finding(
                severity="warning",
                where=name,
                what=f"its stored base differs from {first_name}'s; each is used as stored",
            )
    if root_base is not None and root_base.shape == first.shape and not root_base.equal(first):
        yield Finding(severity="warning", where="mask", what="the unused base at the root differs from those in use")
    formula = stored_base(grid)
    if not first.equal(formula):
        largest = float((first - formula).abs().max())
        yield Finding(
            severity="note" if largest < 1e-6 else "warning",
            where=first_name,
            what=f"the stored base differs from sqrt(exp(−d²)) by up to {largest:.3g}; the stored one is used",
        )
    zeros = int((first == 0).sum())
    coarse = int(((first.square() < _SMALLEST_NORMAL) & (first != 0)).sum())
    if zeros or coarse:
        yield Finding(
            severity="note",
            where=first_name,
            what=f"{zeros} of {first.numel()} entries underflowed to zero and {coarse} lost digits "
            "when the base was stored; the network was trained with them and they are kept",
        )
