"""Collect every step on the attention scores that is no mask, and the memories of attentions without Q Kᵀ.

A step with an entry for each pair of tokens or heads is drawn: biases, decays, diagonals and head mixing. A step with a
number for each head is listed: scales, learned temperatures, and normalisations over heads. Attentions with equal
steps share a picture.

An entry at or below −87.3 that is added to a score is called closed: in float32, exp of the entry underflows, so the
token gets no weight in softmax. −∞, LSA's −987654321 and Swin's −100 are closed entries. They have a colour of their
own, and are left out of the colour scale and the measurements.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.models.layers.attention import attentions_without_scores, memories
from gmmvit_deploy.models.scores.attention import attention_scores

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gmmvit_deploy.models.scores.step import Operation, Step

CLOSED = math.log(float(np.finfo(np.float32).tiny))
"""Added to a score, this number or a smaller number gives a token no weight in softmax."""


def span_of(entries: NDArray[np.float32]) -> dict[str, float | None]:
    """Return the minimum and maximum of the finite entries; None without any."""
    finite = entries[np.isfinite(entries)] + 0.0  # −0, the decay of a token's own score, becomes 0
    return {
        "smallest": float(finite.min()) if finite.size else None,
        "largest": float(finite.max()) if finite.size else None,
    }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DrawnMatrix:
    """A step with an entry for each pair of tokens, or for each pair of heads.

    attentions: those with this step.  name: such as ``before.decay``.  labels: such as ``head 0``.
    matrices: (L, rows, columns).  windows: 1 without windows.  grid: (rows, columns) of the patches, or None.
    """

    attentions: tuple[str, ...]
    name: str
    operation: Operation
    labels: tuple[str, ...]
    matrices: NDArray[np.float32]
    windows: int = 1
    grid: tuple[int, int] | None = None

    @property
    def prefix(self) -> int:
        """The number of prefix tokens in front of the tokens of ``grid``; 0 without a grid."""
        return 0 if self.grid is None else self.matrices.shape[-1] - math.prod(self.grid)

    def closed(self, index: int) -> NDArray[np.bool_]:
        """Return True for each closed entry of a matrix."""
        matrix = self.matrices[index]
        return matrix <= CLOSED if self.operation == "add" else np.zeros(matrix.shape, bool)

    @property
    def open_entries(self) -> NDArray[np.float32]:
        """The finite entries of all matrices that are not closed."""
        closed = np.stack([self.closed(index) for index in range(len(self.labels))])
        return self.matrices[~closed & np.isfinite(self.matrices)]

    def measured(self, index: int) -> dict[str, Any]:
        """Return the minimum and maximum of the open entries (None without any), and the number of closed entries."""
        closed = self.closed(index)
        return {**span_of(self.matrices[index][~closed]), "closed": int(closed.sum())}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadValues:
    """A step with a number for each head, or for all.  values: ``factor`` (multiplies) or ``offset`` → the numbers."""

    attentions: tuple[str, ...]
    name: str
    operation: Operation
    values: dict[str, tuple[float, ...]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Memory:
    """A memory of an attention without Q Kᵀ: the weight of a linear layer, with a row for each output."""

    name: str
    matrix: NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """All steps of a model except masks, and all memories.  omitted: step or attention → why it has no picture."""

    drawn: tuple[DrawnMatrix, ...]
    values: tuple[HeadValues, ...]
    memories: tuple[Memory, ...]
    omitted: dict[str, str]


def steps_of(model: nn.Module) -> Steps:
    """Return all steps of a trained model that are no masks, and the memories of its attentions without Q Kᵀ."""
    groups: dict[tuple[Any, ...], tuple[list[str], str, Step, Tensor]] = {}
    omitted: dict[str, str] = {}
    for attention, scores in attention_scores(model):
        for name, step in scores.steps():
            if step.numbers().patches is not None:
                continue  # a mask, which has pictures of its own
            try:
                matrix = step.matrix().detach()
            except FoldError as exc:
                omitted[f"{attention} {name}"] = str(exc)
                continue
            key = (name, step.operation, tuple(matrix.shape), hashlib.sha256(_array(matrix).tobytes()).hexdigest())
            groups.setdefault(key, ([], name, step, matrix))[0].append(attention)
    drawn: list[DrawnMatrix] = []
    values: list[HeadValues] = []
    for attentions, name, step, matrix in groups.values():
        if _by_head(step, matrix):
            values.append(_values(tuple(attentions), name, step, matrix))
        else:
            drawn.append(_drawn(tuple(attentions), name, step, matrix))
    layers = [Memory(name=name, matrix=_array(layer.weight)) for name, layer in memories(model)]
    with_memories = {memory.name.rpartition(".")[0] for memory in layers}
    for attention in attentions_without_scores(model):
        if not any(f"{attention}.".startswith(f"{owner}.") for owner in with_memories):
            omitted[attention] = "the attention has no Q Kᵀ, and its class declares no memories"
    if getattr(model, "foreign", False):
        omitted["modules of another package"] = (
            "only attentions that call PyTorch's fused attention function, once in a forward pass, are examined"
        )
    return Steps(drawn=tuple(drawn), values=tuple(values), memories=tuple(layers), omitted=omitted)


def _array(tensor: Tensor) -> NDArray[np.float32]:
    array: NDArray[np.float32] = tensor.detach().cpu().float().numpy()
    return array


def _by_head(step: Step, matrix: Tensor) -> bool:
    return step.operation == "normalise" or matrix.dim() < 2 or tuple(matrix.shape[-2:]) == (1, 1)


def _values(attentions: tuple[str, ...], name: str, step: Step, matrix: Tensor) -> HeadValues:
    def listed(numbers: Tensor) -> tuple[float, ...]:
        return tuple(map(float, numbers.flatten().tolist()))

    if step.operation == "normalise":
        factor, offset = matrix
        values = {"factor": listed(factor), "offset": listed(offset)}
    else:
        values = {"offset" if step.operation == "add" else "factor": listed(matrix)}
    return HeadValues(attentions=attentions, name=name, operation=step.operation, values=values)


def _drawn(attentions: tuple[str, ...], name: str, step: Step, matrix: Tensor) -> DrawnMatrix:
    matrices, windows = _array(matrix), 1
    if step.operation == "mix":
        matrices, labels = matrices[None], ["head mixing"]
    else:
        last = None
        if matrices.ndim >= 4:
            by_window = matrices.reshape(-1, *matrices.shape[-3:])
            windows, matrices, last = len(by_window), by_window[0], by_window[-1, :1]
        matrices = matrices.reshape(-1, *matrices.shape[-2:])
        labels = [f"head {head}" for head in range(len(matrices))] if len(matrices) > 1 else ["all heads"]
        if last is not None and windows > 1:
            # Windows differ in the entries that a shift of the windows closes; the last window has most of them.
            labels = [f"first window, {label}" for label in labels] + [f"last window, {labels[0]}"]
            matrices = np.concatenate([matrices, last])
    return DrawnMatrix(
        attentions=attentions,
        name=name,
        operation=step.operation,
        labels=tuple(labels),
        matrices=matrices,
        windows=windows,
        grid=_grid(step, matrices),
    )


def _grid(step: Step, matrices: NDArray[np.float32]) -> tuple[int, int] | None:
    grid = step.numbers().grid
    rows, columns = matrices.shape[-2:]
    return grid if grid is not None and rows == columns and math.prod(grid) <= columns else None
