"""Mistakes with RMT's decay, attention, rotation, releases and BatchNorm, planted in exported graphs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import onnx

from gmmvit_deploy.models.families.rmt.model import DecomposedAttention, ManhattanAttention
from gmmvit_deploy.models.layers.blocks import BATCH_NORM_EPS
from gmmvit_deploy.models.specs import MaskSpec
from tests.models.families.small_models import Small
from tests.planted.graph import GraphCopy, Other, Planted
from tests.planted.locality import family

_RMT = family("rmt")


def _release(release: str, **changes: Any) -> Small:
    return Other(_RMT, "decay", release, replace(_RMT.small(MaskSpec(kind="decay")), release=release, **changes))


R2024 = Small(_RMT, "decay")
R2023 = _release("2023", projection_dim=0)
TOKEN_LABEL = _release("token_label")


# ---- decay ---------------------------------------------------------------------------------------------------------


def _decay(change: Callable[[np.ndarray], np.ndarray], operator: str = "Add") -> Callable[[GraphCopy], None]:
    def plant(graph: GraphCopy) -> None:
        for node in graph.find("Add", r".*\.scores\.before\.decay"):
            graph.change(node, change)
            graph.become(node, operator)

    return plant


# ---- whole and decomposed attention --------------------------------------------------------------------------------


def _whole(graph: GraphCopy) -> None:
    """Attend to the whole grid where the network attends to the rows and then to the columns."""
    for name, attention in _attentions(graph):
        if isinstance(attention, DecomposedAttention):
            total, (rows, columns) = graph.only("Add", name), attention.grid
            query, key, value = _parts(graph, total, f"{name}.rows", attention, rows * columns)
            moved = partial(_moved, graph, total)
            decay = _decays(graph, f"{name}.rows", attention.grid)
            heads = moved(query, 0, 2, 1, 3), moved(key, 0, 2, 3, 1), moved(value, 0, 2, 1, 3)
            mixed = moved(_attended(graph, total, *heads, decay), 0, 2, 1, 3)
            shape = np.array([-1, rows, columns, attention.out.in_features])
            total.input[0] = graph.insert(total, "Reshape", mixed, shape)


def _decomposed(graph: GraphCopy) -> None:
    """Attend to the rows and then to the columns where the network attends to the whole grid."""
    for name, attention in _attentions(graph):
        if not isinstance(attention, DecomposedAttention):
            total, (rows, columns) = graph.only("Add", name), attention.grid
            query, key, value = _parts(graph, total, f"{name}.tokens", attention, rows, columns)
            moved = partial(_moved, graph, total)
            decays = [_decays(graph, f"{name}.tokens", (1, side)) for side in (columns, rows)]
            heads = moved(query, 0, 1, 3, 2, 4), moved(key, 0, 1, 3, 4, 2), moved(value, 0, 1, 3, 2, 4)
            mixed = _attended(graph, total, *heads, decays[0])
            heads = moved(query, 0, 2, 3, 1, 4), moved(key, 0, 2, 3, 4, 1), moved(mixed, 0, 3, 2, 1, 4)
            mixed = _attended(graph, total, *heads, decays[1])
            shape = np.array([-1, rows * columns, attention.out.in_features])
            total.input[0] = graph.insert(total, "Reshape", moved(mixed, 0, 3, 1, 2, 4), shape)


def _parts(
    graph: GraphCopy, before: onnx.NodeProto, module: str, attention: ManhattanAttention, *grid: int
) -> list[str]:
    """Insert reshapes of Q, K and V to (B, grid, heads, head dim)."""
    shape = np.array([-1, *grid, attention.attentions()[0].heads, _head_dim(attention)])
    parts = [node.input[0] for node in graph.find("Reshape", re.escape(module))[:3]]
    return [graph.insert(before, "Reshape", part, shape) for part in parts]


def _moved(graph: GraphCopy, before: onnx.NodeProto, part: str, *perm: int) -> str:
    return graph.insert(before, "Transpose", part, perm=perm)


def _attended(graph: GraphCopy, before: onnx.NodeProto, query: str, key: str, value: str, decay: np.ndarray) -> str:
    """Insert softmax(Q Kᵀ + decay) V.  Folding has merged d^(−1/2) into K."""
    scores = graph.insert(before, "Add", graph.insert(before, "MatMul", query, key), decay)
    return graph.insert(before, "MatMul", graph.insert(before, "Softmax", scores, axis=-1), value)


def _decays(graph: GraphCopy, attention: str, grid: tuple[int, int]) -> np.ndarray:
    """Return log γ_h · (|Δrow| + |Δcolumn|), (H, n, n), for the n tokens of a grid."""
    decay = graph.trained[f"{attention}.scores.before.decay.decay"]
    rows, columns = (places.flatten() for places in np.indices(grid))
    distances = np.abs(rows[:, None] - rows) + np.abs(columns[:, None] - columns)
    return decay[:, None, None] * distances


# ---- rotation ------------------------------------------------------------------------------------------------------


def _rotations(graph: GraphCopy) -> Iterator[tuple[onnx.NodeProto, bool]]:
    """Yield (node, is_sine) for each product with a table of the rotation."""
    for node in graph.find("Mul", r"stages\.\d+\.rotation"):
        assert node.input[1].endswith((".cos", ".sin"))
        yield node, node.input[1].endswith(".sin")


def _no_rotation(graph: GraphCopy) -> None:
    for node, is_sine in list(_rotations(graph)):
        graph.change(node, np.zeros_like if is_sine else np.ones_like)


def _columns_first(graph: GraphCopy) -> None:
    def recounted(table: np.ndarray) -> np.ndarray:
        side = round(np.prod(table.shape[:-1]) ** 0.5)
        return table.reshape(side, side, -1).transpose(1, 0, 2).reshape(table.shape)

    for node, _ in list(_rotations(graph)):
        graph.change(node, recounted)


def _halves_rotated(graph: GraphCopy) -> None:
    """Restore the order of the features of Q, K and the tables, which folding changes to rotate halves of a head."""
    for name, attention in _attentions(graph):
        order = _feature_order(attention)
        node = graph.only("MatMul", rf"{name}\.qkv")
        bias = graph.only("Add", rf"{name}\.qkv")
        for layer in (node, bias):
            values = graph.constant(layer)
            for part in np.split(values, 3, axis=-1)[:2]:
                part[..., order] = part.copy()
            graph.feed(layer, values)
    for node, is_sine in list(_rotations(graph)):
        table = graph.constant(node)
        stage = graph.module(node).removesuffix(".rotation")
        attention = next(attention for name, attention in _attentions(graph) if name.startswith(f"{stage}."))
        half = _head_dim(attention) // 2
        sign = np.tile(np.repeat([-1.0, 1.0], half), table.shape[-1] // (2 * half)) if is_sine else 1.0
        unordered = np.empty_like(table)
        unordered[..., _feature_order(attention)] = table * sign
        graph.feed(node, unordered * sign)


def _attentions(graph: GraphCopy) -> Iterator[tuple[str, ManhattanAttention]]:
    for name, module in graph.model.named_modules():
        if isinstance(module, ManhattanAttention):
            yield name, module


def _head_dim(attention: ManhattanAttention) -> int:
    return attention.out.in_features // attention.attentions()[0].heads


def _feature_order(attention: ManhattanAttention) -> np.ndarray:
    """Return the place of each feature in the file for each feature of the folded Q: 0, 2, …, d−2, 1, 3, … by head."""
    head_dim = _head_dim(attention)
    order = np.concatenate([np.arange(0, head_dim, 2), np.arange(1, head_dim, 2)])
    return np.concatenate([head * head_dim + order for head in range(attention.attentions()[0].heads)])


# ---- releases ------------------------------------------------------------------------------------------------------


def _as_2023(graph: GraphCopy) -> None:
    """Leave the rotation and the convolution of the MLP out of a network of 2024."""
    _no_rotation(graph)
    for node in graph.find("Conv", r".*\.mlp\.convolution\.convolution"):
        identity = np.zeros_like(graph.constant(node, 1))
        identity[..., 1, 1] = 1
        graph.feed(node, identity, 1)
        graph.change(node, np.zeros_like, 2)


def _as_2024(graph: GraphCopy) -> None:
    """Rotate Q and K of a network of 2023: x' = x ∘ cos + (x T) ∘ sin, where T exchanges the features of a pair."""
    for name, attention in _attentions(graph):
        shape, dim = attention.token_shape(), attention.out.in_features
        head_dim = _head_dim(attention)
        rates = 10000.0 ** -np.linspace(0, 1, head_dim // 2)
        angles = np.arange(np.prod(shape)).reshape(*shape, 1) * np.tile(np.repeat(rates, 2), dim // head_dim)
        exchange = np.zeros((dim, dim))
        even = np.arange(0, dim, 2)
        exchange[even + 1, even], exchange[even, even + 1] = -1, 1
        stacked = graph.only("Add", rf"{name}\.qkv").output[0]
        split = next(node for node in graph.nodes if node.op_type == "Split" and node.input[0] == stacked)
        following = graph.nodes[next(i for i, node in enumerate(graph.nodes) if node is split) + 1]
        for place in (0, 1):
            x = split.output[place]
            split.output[place] = f"{x}.unrotated"
            turned = graph.insert(following, "MatMul", split.output[place], exchange)
            scaled = graph.insert(following, "Mul", split.output[place], np.cos(angles))
            other = graph.insert(following, "Mul", turned, np.sin(angles))
            rotated = graph.insert(following, "Add", scaled, other)
            for node in graph.nodes:
                if x in node.input and node is not split:
                    node.input[list(node.input).index(x)] = rotated


# ---- BatchNorm -----------------------------------------------------------------------------------------------------


def other_epsilon(graph: GraphCopy, norm: str, layer: str, epsilon: float) -> None:
    """Change the epsilon of a BatchNorm that folding has merged into a convolution or a linear layer.

    W' = W · r,  b' = (b − β) · r + β    with r = √(σ² + 1e-5) / √(σ² + ε)
    """
    beta, variance = (graph.trained[f"{norm}.{name}"] for name in ("bias", "running_var"))
    ratio = np.sqrt((variance + BATCH_NORM_EPS) / (variance + epsilon))
    for node in [node for node in graph.nodes if graph.module(node) == layer]:
        if node.op_type == "Conv":
            graph.change(node, lambda weight: weight * ratio[:, None, None, None], 1)
            graph.change(node, lambda bias: (bias - beta) * ratio + beta, 2)
        elif node.op_type == "MatMul":
            graph.change(node, lambda weight: weight * ratio)
        else:
            graph.change(node, lambda bias: (bias - beta) * ratio + beta)


def _epsilon_of_norms(graph: GraphCopy) -> None:
    for name in [name.removesuffix(".running_var") for name in graph.trained if name.endswith(".running_var")]:
        if name == "norm":
            _epsilon_of_last_norm(graph)
            continue
        parent = name.removesuffix(".norm")
        layers = [f"{parent}.{layer}" for layer in ("convolution", "linear")]
        (layer,) = (layer for layer in layers if f"{layer}.weight" in graph.trained)
        other_epsilon(graph, name, layer, 1e-3)


def _epsilon_of_last_norm(graph: GraphCopy) -> None:
    """Change the epsilon of the BatchNorm of 2023, which folding has merged into the head behind it."""
    gamma, beta, mean, variance = (
        graph.trained[f"norm.{name}"] for name in ("weight", "bias", "running_mean", "running_var")
    )
    factor = gamma / np.sqrt(variance + 1e-3)
    head = graph.only("Gemm", "head")
    graph.feed(head, graph.trained["head.weight"] * factor, 1)
    graph.feed(head, graph.trained["head.bias"] + graph.trained["head.weight"] @ (beta - mean * factor), 2)


_WHOLE = "attention to the whole grid in the decomposed stages"
_DECOMPOSED = "decomposed attention in the stages that attend to the whole grid"
_RELEASE = "the network of another release: 2023 for 2024, or 2024 for 2023"

CASES = [
    *(
        Planted(R2024, plant, name)
        for plant, name in (
            (_decay(np.zeros_like), "the decay missing"),
            (_decay(lambda decay: decay[::-1]), "the decay of the heads in reverse order"),
            (_decay(lambda decay: decay, "Mul"), "the decay multiplied instead of added"),
            (_decay(np.exp, "Mul"), "γ^distance multiplied instead of the decay added"),
        )
    ),
    Planted(R2023, _decay(lambda decay: decay, "Mul"), "the decay multiplied instead of added"),
    Planted(R2024, _whole, _WHOLE),
    Planted(R2024, _decomposed, _DECOMPOSED),
    Planted(R2024, _no_rotation, "rotary position embedding left out"),
    Planted(R2024, _columns_first, "rotary position embedding with positions counted column by column"),
    Planted(R2024, _halves_rotated, "rotary position embedding of halves of a head in place of pairs"),
    Planted(TOKEN_LABEL, _no_rotation, "rotary position embedding left out"),
    Planted(R2024, _as_2023, _RELEASE),
    Planted(TOKEN_LABEL, _as_2023, _RELEASE),
    Planted(R2023, _as_2024, _RELEASE),
    *(Planted(model, _epsilon_of_norms, "BatchNorm with an epsilon of 1e-3") for model in (R2024, R2023, TOKEN_LABEL)),
]
