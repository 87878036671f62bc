"""What is odd about a checkpoint, before anybody serves it.

Nothing here stops a load but what makes the answer meaningless (NaN and infinities); the rest is
said and left to judgement, each with the layer, head and kernel it is about.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gmmvit_deploy.models.attention import MaskedScores
from gmmvit_deploy.models.biases import WindowBias, relative_position_index
from gmmvit_deploy.models.masks import SIGMA_EPS, ClassTokenMask, GaussianMixtureMask, stored_base

if TYPE_CHECKING:
    from torch import Tensor, nn

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


def audit_model(model: nn.Module, unused: Mapping[str, Tensor]) -> list[Finding]:
    """Look at every mask and bias of a loaded model.

    unused: tensors of the file that the model does not read; base masks among them are compared
    with those in use.
    """
    findings: list[Finding] = []
    bases: dict[str, Tensor] = {}
    for name, scores in model.named_modules():
        if not isinstance(scores, MaskedScores):
            continue
        layer = name.removesuffix(".scores").removesuffix(".inner").removesuffix(".attention")
        mask = scores.mask.patches if isinstance(scores.mask, ClassTokenMask) else scores.mask
        if isinstance(mask, GaussianMixtureMask):
            findings += _audit_mixture(layer, mask)
            bases[layer] = mask.base
        if mask is not None:
            findings += _audit_matrix(layer, mask.matrix().detach())
        if isinstance(scores.bias, WindowBias):
            findings += _audit_bias(layer, scores.bias)
    findings += _audit_bases(bases, unused)
    return findings


def _audit_bias(layer: str, bias: WindowBias) -> Iterator[Finding]:
    window = math.isqrt(bias.index.shape[0])
    if not bias.index.equal(relative_position_index(window)):
        inside = bool(((bias.index >= 0) & (bias.index < bias.table.shape[0])).all())
        yield Finding(
            severity="warning" if inside else "error",
            where=layer,
            what="its stored relative_position_index is not that of its window"
            + ("; the stored one is used" if inside else ", and points outside the bias table"),
        )
    if bias.outside is not None:
        strange = bool(((bias.outside != 0) & (bias.outside != -100)).any())
        if strange:
            yield Finding(
                severity="warning", where=layer, what="its stored shift mask holds values other than 0 and −100"
            )


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


def _audit_bases(bases: Mapping[str, Tensor], unused: Mapping[str, Tensor]) -> Iterator[Finding]:
    """Stored bases: those of one size must be equal, and be sqrt(exp(−d²)); what underflowed is counted."""
    first_of_size: dict[int, str] = {}
    for layer, base in bases.items():
        first = first_of_size.setdefault(base.shape[-1], layer)
        if not base.equal(bases[first]):
            yield Finding(
                severity="warning", where=layer, what=f"its stored base differs from that of {first}; each is used"
            )
    for name, tensor in unused.items():
        used = first_of_size.get(tensor.shape[-1]) if tensor.ndim == 4 else None
        if used is not None and not tensor.equal(bases[used]):
            yield Finding(severity="warning", where=name, what="this unused base differs from those in use")
    for layer in first_of_size.values():
        yield from _audit_base(layer, bases[layer])


def _audit_base(layer: str, base: Tensor) -> Iterator[Finding]:
    formula = stored_base(math.isqrt(base.shape[-1]))
    if not base.equal(formula):
        largest = float((base - formula).abs().max())
        yield Finding(
            severity="note" if largest < 1e-6 else "warning",
            where=layer,
            what=f"the stored base differs from sqrt(exp(−d²)) by up to {largest:.3g}; the stored one is used",
        )
    zeros = int((base == 0).sum())
    coarse = int(((base.square() < _SMALLEST_NORMAL) & (base != 0)).sum())
    if zeros or coarse:
        yield Finding(
            severity="note",
            where=layer,
            what=f"{zeros} of {base.numel()} entries underflowed to zero and {coarse} lost digits "
            "when the base was stored; the network was trained with them and they are kept",
        )
