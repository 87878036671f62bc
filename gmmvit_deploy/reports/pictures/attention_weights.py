"""Record the attention weights of a model for an image, and the tokens that the head of the model reads.

The model runs on the image in float64. Each `AttentionScores` reports its weights, directly after softmax, in the order
of the run. The head reads a token if the logits depend on the token's row of weights in the last attention: after
this attention, every step of a vision transformer treats each token separately, up to the pooling before the head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from gmmvit_deploy.models.scores.attention import AttentionScores, attention_scores

if TYPE_CHECKING:
    from torch import Tensor

    from gmmvit_deploy.models.layers.model import Model


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerWeights:
    """The weights of an attention for an image.

    weights: (sequences, H, queries, keys), directly after softmax, so without ``steps_after``; sequences: such as
    windows.
    grid: (rows, columns) of the tokens of a sequence if a step on the scores states the grid, else None.
    """

    layer: str
    weights: NDArray[np.float64]
    steps_after: tuple[str, ...]
    grid: tuple[int, int] | None

    @property
    def sequences(self) -> int:
        return int(self.weights.shape[0])

    @property
    def queries(self) -> int:
        return int(self.weights.shape[2])

    @property
    def keys(self) -> int:
        return int(self.weights.shape[3])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionRecord:
    """The weights of each attention, in the order of the run, and the logits (C,).

    read: the tokens that the head reads; empty if the logits do not depend on the last attention, or have no gradients.
    """

    layers: tuple[LayerWeights, ...]
    logits: NDArray[np.float64]
    read: tuple[int, ...]


def attention_record(model: Model, image: Tensor) -> AttentionRecord:
    """Run a float64 model in evaluation mode on an image (1, channels, height, width), and return the weights."""
    layers: list[LayerWeights] = []
    last: list[Tensor] = []

    def report(layer: LayerWeights, weights: Tensor) -> None:
        layers.append(layer)
        last[:] = [weights]

    with ExitStack() as stack, torch.enable_grad():
        for name, scores in attention_scores(model):
            stack.enter_context(_reported(name, scores, report))
        logits = model(image)
        read = _rows_read(logits, last[0]) if last else ()
    return AttentionRecord(layers=tuple(layers), logits=logits.detach()[0].numpy(), read=read)


@contextmanager
def _reported(name: str, scores: AttentionScores, report: Callable[[LayerWeights, Tensor], None]) -> Iterator[None]:
    """Call ``report`` with the weights of each run, also as a tensor with gradient and the steps after softmax."""
    original = scores.normalised
    steps = tuple(step for step, _ in scores.steps_after())
    grids = (getattr(step, "grid", None) for _, step in scores.steps_before())
    grid = next((grid for grid in grids if isinstance(grid, tuple)), None)

    def normalised(before: Tensor) -> Tensor:
        weights = original(before)
        plain = torch.softmax(before.detach(), dim=-1) if steps else weights.detach()
        array = plain.double().numpy().reshape(-1, *plain.shape[-3:])
        report(LayerWeights(layer=name, weights=array, steps_after=steps, grid=grid), weights)
        return weights

    # An attribute of the instance hides the method. `weights` looks the method up at each call.
    scores.__dict__["normalised"] = normalised
    try:
        yield
    finally:
        del scores.__dict__["normalised"]


def _rows_read(logits: Tensor, weights: Tensor) -> tuple[int, ...]:
    """Return the rows of ``weights`` (…, queries, keys) on which the logits (1, C) depend."""
    if not (logits.requires_grad and weights.requires_grad):
        return ()
    # Different factors, because a sum of all logits can be the same for every image.
    factors = torch.linspace(1, 2, logits.shape[-1], dtype=logits.dtype)
    gradient: Tensor | None = torch.autograd.grad((logits * factors).sum(), weights, allow_unused=True)[0]
    if gradient is None:
        return ()
    changed: Any = (gradient != 0).any(dim=-1).reshape(-1, gradient.shape[-2]).any(dim=0)
    return tuple(int(row) for row in torch.nonzero(changed).flatten())
