"""Audit a checkpoint before it is served.

Findings of severity ``error``, such as NaN in a tensor that the model uses, stop the load; all others are only
reported. In this module a kernel is a Gaussian of a Gaussian mixture mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from gmmvit_deploy.models.folding.dead_masks import dead_masks
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.scores.attention import attention_scores
from gmmvit_deploy.models.scores.masks import stored_base, stored_base_limits
from gmmvit_deploy.models.scores.step import Oddity

if TYPE_CHECKING:
    from torch import Tensor

DEAD_MASK = (
    "the mask of this layer has no influence on the logits: after this attention the network reads only tokens whose "
    "row and column are not masked, such as the class token; the export leaves the mask out"
)
_SMALLEST_NORMAL = 2.0**-126  # float32


def audit_tensors(tensors: Mapping[str, Tensor], used: set[str]) -> Iterator[Oddity]:
    """Yield a finding for each tensor with NaN or infinite values.

    used: the tensors that the model uses: a finding in such a tensor is an error, in any other tensor a warning.
    """
    for name, tensor in tensors.items():
        bad = int((~tensor.isfinite()).sum())
        if bad:
            yield Oddity(
                severity="error" if name in used else "warning",
                where=name,
                what=f"{bad} of {tensor.numel()} values are NaN or infinite",
            )


def audit_model(model: Model, unused: Mapping[str, Tensor]) -> list[Oddity]:
    """Audit the steps on the attention scores, the classifier head, and what the family knows (`Model.oddities`).

    unused: the tensors of the file that the model does not read; base masks among them are compared with the used ones.
    """
    findings: list[Oddity] = []
    bases: dict[str, Tensor] = {}
    grids: dict[str, tuple[int, int]] = {}
    for name, scores in attention_scores(model):
        layer = layer_of(name)
        for _, step in scores.steps():
            findings += [replace(oddity, where=layer + oddity.where) for oddity in step.oddities()]
            numbers = step.numbers()
            if numbers.base is not None and numbers.grid is not None:
                bases[layer], grids[layer] = numbers.base, numbers.grid
    findings += _audit_bases(bases, grids, unused)
    findings += [replace(oddity, where=where + oddity.where) for where, oddity in model.oddities()]
    return [*findings, *_audit_heads(model)]


def _audit_heads(model: Model) -> Iterator[Oddity]:
    """Yield a warning for each classifier head whose weights are all zero."""
    heads = dict(model.classifier_heads())
    for name, head in heads.items():
        if bool((head.weight != 0).any()):
            continue
        effect = (
            "a deployed model with a zero head predicts the same class for every image"
            if len(heads) == 1
            else "a zero head adds the same numbers to the logits of every image"
        )
        yield Oddity(
            severity="warning",
            where=name,
            what=f"all weights of the classifier head are zero; fine-tuning starts from a zero head, and {effect}",
        )


def audit_dead_masks(model: Model) -> list[Oddity]:
    """Return a note for each mask of a loaded model that has no influence on the logits (`dead_masks`)."""
    dead = dict.fromkeys(layer for layer, _ in dead_masks(model))
    return [Oddity(severity="note", where=layer_of(layer), what=DEAD_MASK) for layer in dead]


def layer_of(attention: str) -> str:
    """Return the name of the layer, as in `Oddity.where`, that contains the attention with this name."""
    return attention.removesuffix(".inner").removesuffix(".attention")


def _audit_bases(
    bases: Mapping[str, Tensor], grids: Mapping[str, tuple[int, int]], unused: Mapping[str, Tensor]
) -> Iterator[Oddity]:
    first_of_size: dict[int, str] = {}
    for layer, base in bases.items():
        first = first_of_size.setdefault(base.shape[-1], layer)
        if not base.equal(bases[first]):
            yield Oddity(
                severity="warning",
                where=layer,
                what=f"the stored base mask differs from the base mask of {first}; each layer uses its own base mask",
            )
    for name, tensor in unused.items():
        used = first_of_size.get(tensor.shape[-1]) if tensor.ndim == 4 else None
        if used is not None and not tensor.equal(bases[used]):
            yield Oddity(severity="warning", where=name, what="this unused base mask differs from the used base masks")
    for layer in first_of_size.values():
        yield from _audit_base(layer, bases[layer], grids[layer])


def _audit_base(layer: str, base: Tensor, grid: tuple[int, int]) -> Iterator[Oddity]:
    difference = (base - stored_base(grid)).abs()
    if not bool((difference <= stored_base_limits(grid)).all()):  # within the limits, another processor computed it
        largest = float(difference.max())
        yield Oddity(
            severity="note" if largest < 1e-6 else "warning",
            where=layer,
            what=f"the stored base differs from sqrt(exp(−d²)) by up to {largest:.3g}; the stored base is used",
        )
    zeros = int((base == 0).sum())
    coarse = int(((base.square() < _SMALLEST_NORMAL) & (base != 0)).sum())
    if zeros or coarse:
        yield Oddity(
            severity="note",
            where=layer,
            what=f"{zeros} of {base.numel()} entries of the stored base mask underflowed to zero and {coarse} lost "
            "digits; the network was trained with these values, so they are kept",
        )
