"""Explain a failed runner: make usual mistakes on purpose, and compare the resulting logits with the runner's logits.

A suspect is the trained model with a single mistake, or the trained model with a wrongly prepared input. Parity tries
the suspects only after a runner has failed. The named mistake is a hint and does not change the verdict.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.inference.precision import Role
from gmmvit_deploy.models.families import family_of
from gmmvit_deploy.models.folding.dead_masks import drop_dead_masks
from gmmvit_deploy.models.layers.embeddings import flatten_channel_first
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.layers.patches import ShiftedViews
from gmmvit_deploy.models.scores.attention import attention_scores
from gmmvit_deploy.parity._image_mistakes import bgr, normalised_otherwise
from gmmvit_deploy.parity.reference import Reference

_EXPLAINED = 0.1
"""A suspect explains the runner's logits if this share of their distance from PyTorch's logits, or less, remains."""


@torch.inference_mode()
def explain(
    bundle: Bundle,
    reference: Reference,
    inputs: NDArray[Any],
    logits: NDArray[Any],
    limit: float,
    *,
    labels: Sequence[str] = (),
    mistakes: Iterable[tuple[str, NDArray[Any]]] | None = None,
) -> str:
    """Return the name of the mistake that explains a runner's logits (B, C) for inputs of the graph (B, …), or "".

    limit: the largest absolute difference allowed for a correct runner.
    labels: the C classes, which may be exchanged; () for features.
    mistakes: the output of `suspects` for these inputs, if already computed; None calls `suspects`.
    """
    trained, _ = reference.logits(inputs)
    if logits.shape != trained.shape or not np.isfinite(logits).all():
        return ""
    if _are_halves(logits, trained, limit):
        return "the logits rounded to float16"
    if exchanged := _exchanged(logits, trained, limit, labels):
        return exchanged
    unexplained = float(np.abs(logits - trained).max())
    best, nearest = "", max(limit, _EXPLAINED * unexplained)
    for name, mistaken in suspects(bundle, reference, inputs) if mistakes is None else mistakes:
        distance = float(np.abs(logits - mistaken).max())
        # The mistake must change the logits by more than ten times the difference that remains.
        if distance < nearest and distance < _EXPLAINED * float(np.abs(mistaken - trained).max()):
            best, nearest = name, distance
    return best


def _exchanged(logits: NDArray[Any], trained: NDArray[Any], limit: float, labels: Sequence[str]) -> str:
    """Return which classes have PyTorch's logits of another class, if those are all that differ; else ""."""
    exchanged = []
    off = np.abs(logits - trained).max(axis=0)
    for index in map(int, np.flatnonzero(off > limit)):
        distances = np.abs(trained - logits[:, [index]]).max(axis=0)
        nearest = int(distances.argmin())
        if not labels or distances[nearest] > min(limit, _EXPLAINED * off[index]):
            return ""
        exchanged.append(f"the class {labels[index]!r} has the logits of {labels[nearest]!r}")
    return "; ".join(exchanged[:3]) + (f" and {len(exchanged) - 3} more" if len(exchanged) > 3 else "")


def _are_halves(logits: NDArray[Any], trained: NDArray[Any], limit: float) -> bool:
    """Whether every logit is a float16 value within a float16 step plus ``limit`` of PyTorch's logit.

    Near the middle of two float16 values, the runner's logit may be rounded to another value than PyTorch's.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        halves = logits.astype(np.float16)
        steps = np.spacing(np.abs(halves)).astype(np.float64)
    return bool((halves == logits).all() and (np.abs(logits - trained) <= steps + limit).all())


@torch.inference_mode()
def suspects(bundle: Bundle, reference: Reference, inputs: NDArray[Any]) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield (name, float32 logits (B, C)) for every mistake that applies to this model and changes its logits.

    Each mistake in a step is made in all attention layers; if the graph leaves out a mask that has no influence on the
    logits, also in the layers alone whose masks are in the graph.
    inputs: (B, …) in the form of the graph's input.
    """
    tensors = reference.tensors(inputs)
    for name, changed in _other_inputs(bundle, inputs):
        yield name, reference.model(torch.from_numpy(changed)).numpy()
    trained = reference.model(tensors)
    everywhere: dict[str, torch.Tensor] = {}
    for name, mistaken in _step_mistakes(reference.model):
        everywhere[name] = mistaken(tensors)
        if not everywhere[name].equal(trained):
            yield name, everywhere[name].numpy()
    for name, mistaken in _step_mistakes_in_graph(bundle, reference.model):
        logits = mistaken(tensors)
        if not logits.equal(trained) and not logits.equal(everywhere[name]):
            yield f"{name}, only in the masks of the graph", logits.numpy()
    for name, change in (*_MODULE_MISTAKES, *family_of(reference.model.spec).network().mistakes):
        model = copy.deepcopy(reference.model)
        if change(model):
            yield name, model(tensors).numpy()


def _other_inputs(bundle: Bundle, inputs: NDArray[Any]) -> Iterator[tuple[str, NDArray[Any]]]:
    image, exchanged = bundle.manifest.image, "rows and columns of the image exchanged"
    if bundle.manifest.input_kind == "pixels":
        yield from normalised_otherwise(inputs, image)
        yield exchanged, image.tensor_from_pixels(inputs.swapaxes(1, 2))
        return
    if (colours := bgr(image.channels)) is not None:
        yield "channels in the order BGR", np.ascontiguousarray(inputs[:, colours])
    yield exchanged, np.ascontiguousarray(inputs.swapaxes(2, 3))


_TRIED_FIRST: tuple[Role, ...] = ("mask", "scale", "score_bias", "mixing", "norm")
"""Roles of steps in the order in which mistakes are tried.  Of mistakes with equal logits, the first is named."""


def _step_mistakes(model: Model) -> Iterator[tuple[str, Model]]:
    """Yield (name, model with the mistake in all attention layers) for every mistake of a score step."""
    steps = [step for _, scores in attention_scores(model) for _, step in scores.steps()]
    steps.sort(key=lambda step: _TRIED_FIRST.index(step.role) if step.role in _TRIED_FIRST else len(_TRIED_FIRST))
    names = dict.fromkeys(name for step in steps for name, _ in step.mistakes())
    for mistake in names:
        mistaken = copy.deepcopy(model)
        if _make(mistake, mistaken):
            yield mistake, mistaken


def _step_mistakes_in_graph(bundle: Bundle, model: Model) -> Iterator[tuple[str, Model]]:
    """Yield `_step_mistakes` of the model without the masks that the bundle's graph leaves out, if there are such."""
    if drop_dead_masks.__name__ not in bundle.manifest.folding:
        return
    layers = {record.layer for record in bundle.manifest.masks}
    remaining = copy.deepcopy(model)
    for layer, scores in attention_scores(remaining):
        for name, step in list(scores.steps()):
            if step.role == "mask" and layer not in layers:
                scores.put(name, None)
    yield from _step_mistakes(remaining)


def _make(mistake: str, model: Model) -> bool:
    """Make a mistake in every step that lists it; return False if none does."""
    changed = False
    for _, scores in attention_scores(model):
        for step_name, step in list(scores.steps()):
            other = next((other for name, other in step.mistakes() if name == mistake), step)
            if other is not step:
                scores.put(step_name, other)
                changed = True
    return changed


def _set_on(kind: type[nn.Module], name: str, value: object) -> Callable[[Model], bool]:
    def apply(model: Model) -> bool:
        for module in model.modules():
            if isinstance(module, kind):
                setattr(module, name, value)
        return True

    return apply


def _shifts_of_one_pixel(model: Model) -> bool:
    views = [module for module in model.modules() if isinstance(module, ShiftedViews) and module.shift > 1]
    for module in views:
        module.shift = 1
    return bool(views)


def _rotation_of(patches: Callable[[int], torch.Tensor]) -> Callable[[Model], bool]:
    """Return a function that gives each patch the rotation of another patch.

    patches: returns the indices of these patches, (g, g), for a grid of g × g patches.
    """

    def rotated_otherwise(compute: Callable[..., Any], *args: Any, **options: Any) -> Any:
        tables = compute(*args, **options)
        if isinstance(tables, tuple):
            return tuple(_at(table) for table in tables)
        return _at(tables)

    def _at(table: torch.Tensor) -> torch.Tensor:
        side = math.isqrt(table.shape[-2])
        return table[..., patches(side).flatten(), :] if side * side == table.shape[-2] else table

    def apply(model: Model) -> bool:
        found = False
        for module in model.modules():
            # of timm, and of transformers
            name = "get_embed" if hasattr(module, "get_embed") else "forward"
            if name == "get_embed" or type(module).__name__.endswith("RopePositionEmbedding"):
                setattr(module, name, partial(rotated_otherwise, getattr(module, name)))
                found = True
        return found

    return apply


def _numbered(side: int) -> torch.Tensor:
    return torch.arange(side * side).reshape(side, side)


def _without_unit_length(model: Model) -> bool:
    normalised, model.normalises = model.normalises, False
    return normalised


_MODULE_MISTAKES: tuple[tuple[str, Callable[[Model], bool]], ...] = (
    ("LayerNorm with an epsilon of 1e-6", _set_on(nn.LayerNorm, "eps", 1e-6)),
    ("LayerNorm with an epsilon of 1e-12", _set_on(nn.LayerNorm, "eps", 1e-12)),
    ("the tanh approximation of GELU", _set_on(nn.GELU, "approximate", "tanh")),
    ("patches shifted by a single pixel in place of half a patch", _shifts_of_one_pixel),
    ("features without unit length", _without_unit_length),
    ("patches flattened with the channel first", flatten_channel_first),
    ("rotation with rows and columns of the grid exchanged", _rotation_of(lambda side: _numbered(side).T)),
    (
        "rotation of a grid of half the side",
        _rotation_of(
            lambda side: _numbered(side)[::2, ::2].repeat_interleave(2, 0).repeat_interleave(2, 1)[:side, :side]
        ),
    ),
)
"""Mistakes in modules outside the attention scores: (name, function that changes the model in place)."""
