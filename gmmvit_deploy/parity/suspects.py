"""What went wrong?  The usual mistakes, made on purpose, until one gives the runner's very answers.

Each suspect is the trained model with one mistake in it, or its input prepared with one. Only tried
where a runner has failed; naming one is help, not part of the verdict.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from gmmvit_deploy.artifacts import Bundle
from gmmvit_deploy.families import family_of
from gmmvit_deploy.layers.model import Model
from gmmvit_deploy.parity.preprocessing import bgr, normalisations
from gmmvit_deploy.parity.reference import Reference
from gmmvit_deploy.precision import Role
from gmmvit_deploy.scores.attention import attention_scores

__all__ = ["explain", "suspects"]

_EXPLAINED = 0.1
"""Share of the unexplained distance below which a suspect is believed."""


@torch.inference_mode()
def explain(
    bundle: Bundle,
    reference: Reference,
    inputs: NDArray[Any],
    found: NDArray[Any],
    limit: float,
    *,
    mistakes: Iterable[tuple[str, NDArray[Any]]] | None = None,
) -> str:
    """Return in words the mistake that explains ``found``, or an empty string if no mistake does.

    inputs (B, …) as the graph takes them; found (B, C), what the runner gave; limit: as for a right runner; mistakes:
    what `suspects` gives for these inputs, where it was computed before.
    """
    trained, _ = reference.logits(inputs)
    if found.shape != trained.shape or not np.isfinite(found).all():
        return ""
    if _are_halves(found, trained, limit):
        return "the logits rounded to float16"
    unexplained = float(np.abs(found - trained).max())
    best, nearest = "", max(limit, _EXPLAINED * unexplained)
    for name, logits in suspects(bundle, reference, inputs) if mistakes is None else mistakes:
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
    for name, mistaken in _step_mistakes(reference.model):
        yield name, mistaken(tensors).numpy()
    for name, change in (*_MODULE_MISTAKES, *family_of(reference.model.spec).mistakes):
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


_TRIED_FIRST: tuple[Role, ...] = ("mask", "scale", "score_bias", "mixing", "norm")
"""Of two mistakes with the same logits the first is named, so the likelier one comes first."""


def _step_mistakes(model: Model) -> Iterator[tuple[str, Model]]:
    """Every mistake that a step of the scores knows of, made in all attentions at once."""
    steps = [step for _, scores in attention_scores(model) for _, step in scores.steps()]
    steps.sort(key=lambda step: _TRIED_FIRST.index(step.role) if step.role in _TRIED_FIRST else len(_TRIED_FIRST))
    names = dict.fromkeys(name for step in steps for name, _ in step.mistakes())
    for mistake in names:
        mistaken = copy.deepcopy(model)
        if _make(mistake, mistaken):
            yield mistake, mistaken


def _make(mistake: str, model: Model) -> bool:
    """Replace every step that can be so mistaken; False where that changes nothing."""
    changed = False
    for _, scores in attention_scores(model):
        for step_name, step in list(scores.steps()):
            for name, other in step.mistakes():
                if name == mistake:
                    if other is not step:
                        scores.put(step_name, other)
                        changed = True
                    break
    return changed


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


_MODULE_MISTAKES: tuple[tuple[str, Callable[[Model], bool]], ...] = (
    ("LayerNorm with an epsilon of 1e-6", _layer_norm_eps(1e-6)),
    ("LayerNorm with an epsilon of 1e-12", _layer_norm_eps(1e-12)),
    ("the tanh approximation of GELU", _tanh_gelu),
)
"""Mistakes that belong to modules and not to a step of the scores."""
