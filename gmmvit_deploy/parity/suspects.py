"""What went wrong?  The usual mistakes, made on purpose, until one gives the runner's very answers.

Each suspect is the trained model with one mistake in it, or its input prepared with one. Only tried
where a runner has failed; naming one is help, not part of the verdict.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gmmvit_deploy.artifacts import Bundle
from gmmvit_deploy.folding.passes import masked_scores
from gmmvit_deploy.models.biases import ConstantBias, WindowBias
from gmmvit_deploy.models.build import Model
from gmmvit_deploy.models.masks import (
    ClassTokenMask,
    ClosedFormGaussianMask,
    ConstantMask,
    GaussianMixtureMask,
    Mask,
    squared_distances,
)
from gmmvit_deploy.parity.preprocessing import bgr, normalisations
from gmmvit_deploy.parity.reference import Reference

__all__ = ["explain", "suspects"]

_EXPLAINED = 0.1
"""Share of the unexplained distance below which a suspect is believed."""


@torch.inference_mode()
def explain(bundle: Bundle, reference: Reference, inputs: NDArray[Any], found: NDArray[Any], limit: float) -> str:
    """The mistake that explains ``found``, in words; empty when none of these does.

    inputs (B, …) as the graph takes them; found (B, C), what the runner gave; limit: as for a right runner.
    """
    trained, _ = reference.logits(inputs)
    if found.shape != trained.shape or not np.isfinite(found).all():
        return ""
    if _are_halves(found, trained, limit):
        return "the logits rounded to float16"
    unexplained = float(np.abs(found - trained).max())
    best, nearest = "", max(limit, _EXPLAINED * unexplained)
    for name, logits in suspects(bundle, reference, inputs):
        distance = float(np.abs(found - logits).max())
        # A mistake that changes less than is left over explains nothing.
        if distance < nearest and distance < _EXPLAINED * float(np.abs(logits - trained).max()):
            best, nearest = name, distance
    return best


def _are_halves(found: NDArray[Any], trained: NDArray[Any], limit: float) -> bool:
    """Every one a float16, and not farther away than rounding to it, and a right runner, can take it.

    Rounding the trained logits and comparing would not do: where one is near the middle of two float16 the runner's
    may be rounded to the other.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        halves = found.astype(np.float16)
        steps = np.spacing(np.abs(halves)).astype(np.float64)
    return bool((halves == found).all() and (np.abs(found - trained) <= steps + limit).all())


@torch.inference_mode()
def suspects(bundle: Bundle, reference: Reference, inputs: NDArray[Any]) -> Iterator[tuple[str, NDArray[Any]]]:
    """(mistake in words, the float32 logits it gives) of every mistake that this model can be given."""
    tensors = reference.tensors(inputs)
    for name, changed in _other_inputs(bundle, inputs):
        yield name, reference.model(torch.from_numpy(changed)).numpy()
    for name, change in _MODEL_MISTAKES:
        model = copy.deepcopy(reference.model)
        if change(model):
            yield name, model(tensors).numpy()


def _other_inputs(bundle: Bundle, inputs: NDArray[Any]) -> Iterator[tuple[str, NDArray[Any]]]:
    image = bundle.manifest.image
    colours = bgr(image.channels)
    if bundle.manifest.input_kind == "tensor":
        if colours is not None:
            yield "channels in the order BGR", np.ascontiguousarray(inputs[:, colours])
        yield "rows and columns of the image exchanged", np.ascontiguousarray(inputs.swapaxes(2, 3))
    else:
        if colours is not None:
            yield "channels in the order BGR", image.tensor_from_pixels(inputs[..., colours])
        yield "rows and columns of the image exchanged", image.tensor_from_pixels(inputs.swapaxes(1, 2))
        for name, other in normalisations(image):
            yield name, other.tensor_from_pixels(inputs)


def _each_mask(change: Callable[[Mask], Mask | None]) -> Callable[[Model], bool]:
    """Replace every mask by what ``change`` makes of it; it says None where it would change nothing."""

    def apply(model: Model) -> bool:
        changed = False
        for _, scores in masked_scores(model):
            new = change(scores.mask) if scores.mask is not None else None
            if new is not None:
                scores.mask, changed = new, True
        return changed

    return apply


def _each_matrix(change: Callable[[Tensor], Tensor]) -> Callable[[Model], bool]:
    def of(mask: Mask) -> Mask | None:
        matrix = mask.matrix()
        new = change(matrix)
        return None if torch.equal(new, matrix) else ConstantMask(new)

    return _each_mask(of)


def _closed(mask: Mask) -> Mask | None:
    if isinstance(mask, ClassTokenMask):
        inner = _closed(mask.patches)
        return None if inner is None else ClassTokenMask(inner)
    if not isinstance(mask, GaussianMixtureMask):
        return None
    grid = round(mask.base.shape[-1] ** 0.5)
    return ClosedFormGaussianMask(mask.alpha.detach(), mask.sigma.detach(), squared_distances(grid))


def _class_row(*, column: bool) -> Callable[[Mask], Mask | None]:
    def of(mask: Mask) -> Mask | None:
        if not isinstance(mask, ClassTokenMask):
            return None
        matrix = mask.matrix().clone()
        matrix[..., 0, 1:] = 0
        if column:
            matrix[..., 0] = 0
        return ConstantMask(matrix)

    return of


def _scale_power(power: int) -> Callable[[Model], bool]:
    def apply(model: Model) -> bool:
        found = [scores for _, scores in masked_scores(model) if scores.scale is not None]
        for scores in found:
            scores.scale = float(scores.scale or 1.0) ** power
        return bool(found)

    return apply


def _bias(keep: Callable[[WindowBias], Tensor]) -> Callable[[Model], bool]:
    def apply(model: Model) -> bool:
        changed = False
        for _, scores in masked_scores(model):
            if isinstance(scores.bias, WindowBias):
                scores.bias, changed = ConstantBias(keep(scores.bias)), True
        return changed

    return apply


def _without_shift(bias: WindowBias) -> Tensor:
    return WindowBias(bias.table.detach(), bias.index, None).matrix()


def _layer_norm_eps(eps: float) -> Callable[[Model], bool]:
    def apply(model: Model) -> bool:
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.eps = eps
        return True

    return apply


def _tanh_gelu(model: Model) -> bool:
    for module in model.modules():
        if isinstance(module, nn.GELU):
            module.approximate = "tanh"
    return True


def _swap_first_heads(matrix: Tensor) -> Tensor:
    if matrix.ndim < 3 or matrix.shape[-3] < 2:
        return matrix
    order = [1, 0, *range(2, matrix.shape[-3])]
    return matrix[..., order, :, :]


_MODEL_MISTAKES: tuple[tuple[str, Callable[[Model], bool]], ...] = (
    ("the closed-form Gaussian mask in place of the stored base's", _each_mask(_closed)),
    ("no mask at all", _each_matrix(torch.ones_like)),
    ("masks transposed", _each_matrix(lambda matrix: matrix.transpose(-1, -2))),
    ("masks of the heads in reverse order", _each_matrix(lambda m: m.flip(-3) if m.ndim > 2 else m)),
    ("masks of the heads moved on by one", _each_matrix(lambda m: m.roll(1, -3) if m.ndim > 2 else m)),
    ("masks of the first two heads exchanged", _each_matrix(_swap_first_heads)),
    ("masks shifted by one token, down", _each_matrix(lambda matrix: matrix.roll(1, -2))),
    ("masks shifted by one token, across", _each_matrix(lambda matrix: matrix.roll(1, -1))),
    ("masks shifted by one token, down and across", _each_matrix(lambda matrix: matrix.roll((1, 1), (-2, -1)))),
    ("the class token's row masked with zeros", _each_mask(_class_row(column=False))),
    ("the class token's row and column masked with zeros", _each_mask(_class_row(column=True))),
    ("1/√d missing", _scale_power(0)),
    ("1/√d applied twice", _scale_power(2)),
    ("the position bias without the shift mask", _bias(_without_shift)),
    ("no position bias and no shift mask", _bias(lambda bias: torch.zeros_like(bias.matrix()))),
    ("LayerNorm with an epsilon of 1e-6", _layer_norm_eps(1e-6)),
    ("LayerNorm with an epsilon of 1e-12", _layer_norm_eps(1e-12)),
    ("the tanh approximation of GELU", _tanh_gelu),
)
