"""Mistakes with SPT (shifted patches) and LSA (learned temperature, masked diagonal), planted in exported graphs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx

from gmmvit_deploy.models.families import FAMILIES
from gmmvit_deploy.models.families.family import Family
from gmmvit_deploy.models.scores.attention import attention_scores
from gmmvit_deploy.models.scores.scales import LearnedTemperature
from tests.models.families.small_models import Small
from tests.planted.graph import GraphCopy, Planted, changed

_DIAGONAL, _FACTOR = r".*\.scores\.before\.(diagonal|bias)", r".*\.scores\.before\.diagonal"
Temperatures = Callable[[np.ndarray, float], np.ndarray]
"""(temperatures of the heads, d^(−1/2)) → other temperatures."""


def family(name: str) -> Family:
    return next(family for family in FAMILIES if family.name == name)


def other_temperature(other: Temperatures) -> Callable[[GraphCopy], None]:
    """Replace the temperatures, which folding has multiplied into the weights that compute Q."""

    def plant(graph: GraphCopy) -> None:
        for attention, scores in attention_scores(graph.model):
            (step,) = (step for _, step in scores.steps() if isinstance(step, LearnedTemperature))
            learned = step.matrix().detach().double().flatten().numpy()
            _multiply_queries(graph, attention, other(learned, step.usual) / learned)

    return plant


def _multiply_queries(graph: GraphCopy, attention: str, factors: np.ndarray) -> None:
    separate = any(graph.module(node) == f"{attention}.query" for node in graph.nodes)
    layer, parts = (f"{attention}.query", 1) if separate else (f"{attention}.qkv", 3)
    for node in (node for node in graph.nodes if graph.module(node) == layer):
        values = graph.constant(node)  # (D, parts · H · d) of the product, or (parts · H · d) of the bias
        count = values.shape[-1] // parts
        values[..., :count] *= np.repeat(factors, count // len(factors))
        graph.feed(node, values)


def _diagonal(array: np.ndarray, values: np.ndarray | float) -> np.ndarray:
    token = np.arange(array.shape[-1])
    array[..., token, token] = values
    return array


def diagonal_not_masked(graph: GraphCopy) -> None:
    """Replace the −∞ on the diagonal: by 0, or in Swin by the position bias of a token with itself."""
    for node in graph.find("Add", _DIAGONAL):
        graph.change(node, lambda array, node=node: _diagonal(array, _bias_of_token_itself(graph, node)))


def _bias_of_token_itself(graph: GraphCopy, node: onnx.NodeProto) -> np.ndarray | float:
    table = graph.trained.get(f"{graph.module(node)}.table")
    if table is None:
        return 0.0
    return table[int(graph.trained[f"{graph.module(node)}.index"][0, 0])][:, None]


def _large_number_on_diagonal(graph: GraphCopy) -> None:
    for node in graph.find("Mul", _FACTOR):
        tokens = graph.constant(node).shape[-1]
        products = node.input[1]
        masked = graph.insert(node, "Mul", node.input[0], products)
        graph.become(node, "Add", masked, _diagonal(np.zeros((tokens, tokens)), -987654321.0))


def _minus_infinity_after_mixing(graph: GraphCopy) -> None:
    for factor in graph.find("Mul", _FACTOR):
        tokens = graph.constant(factor).shape[-1]
        softmax = graph.only("Softmax", graph.module(factor).removesuffix(".scores.before.diagonal"))
        masked = _diagonal(np.zeros((tokens, tokens)), -np.inf)
        softmax.input[0] = graph.insert(softmax, "Add", softmax.input[0], masked)


def shifts_of_one_pixel(graph: GraphCopy) -> None:
    """Shift the views of the image by a pixel; other views, of tokens, are shifted by a single token already."""
    for pad in graph.find("Pad", r"(patch_embedding\.)?views"):
        assert graph.constant(pad, 1).max() > 1
        graph.change(pad, lambda pads: np.minimum(pads, 1), 1)
        for cut in graph.find("Slice", graph.module(pad)):
            start, end = graph.constant(cut, 1), graph.constant(cut, 2)
            shifted = np.minimum(start, 2)
            graph.feed(cut, shifted, 1)
            graph.feed(cut, end - start + shifted, 2)


_CHANNEL_LAST = [0, 2, 4, 3, 5, 1]  # (B, channel, row, row in patch, column, column in patch) → channel last


def channel_first(graph: GraphCopy) -> None:
    """Flatten patches in the order (channel, row, column)."""
    cuts = [node for node in graph.find("Transpose") if list(node.attribute[0].ints) == _CHANNEL_LAST]
    assert cuts
    for node in cuts:
        graph.set_attribute(node, "perm", [0, 2, 4, 1, 3, 5])
    for norm in graph.find("LayerNormalization"):
        if not graph.module(norm).endswith("merge.patches.norm"):
            continue
        order = np.arange(graph.constant(norm, 1).size).reshape(2, 2, -1)  # patches of 2×2 tokens
        norm.input[0] = graph.insert(norm, "Gather", norm.input[0], order.transpose(2, 0, 1).flatten(), axis=-1)


def _bias_without_shift_mask(graph: GraphCopy) -> None:
    for node in graph.find("Add", _DIAGONAL):
        table, index = (graph.trained[f"{graph.module(node)}.{name}"] for name in ("table", "index"))
        bias = np.moveaxis(table[index.astype(int)], -1, 0)
        graph.change(node, lambda array, bias=bias: _diagonal(np.broadcast_to(bias, array.shape).copy(), -np.inf))


MODELS = {name: Small(family(name), "plain", "spt-lsa") for name in ("vit", "swin", "cait", "pit", "t2t")}
_PATCHES_OF_4: dict[str, Small | str] = {**{name: MODELS[name] for name in ("vit", "cait", "pit")}, "swin": "spt_swin"}
"""Models whose patches are shifted by more than a pixel.  Those of T2T are shifted by a pixel."""

TEMPERATURES: dict[str, Temperatures] = {
    "the learned temperature missing": lambda learned, usual: np.ones_like(learned),
    "1/√d in place of the learned temperature": lambda learned, usual: np.full_like(learned, usual),
    "the temperature taken for its logarithm": lambda learned, usual: np.exp(learned),
    "the scores divided by the learned temperature": lambda learned, usual: 1 / learned,
}
_OF_EVERY_FAMILY = ("the learned temperature missing", "the scores divided by the learned temperature")

CASES = [
    *(
        Planted(model, other_temperature(other), name)
        for family_name, model in MODELS.items()
        for name, other in TEMPERATURES.items()
        if family_name == "vit" or name in _OF_EVERY_FAMILY
    ),
    *(
        Planted(
            model,
            changed("Mul", _FACTOR, np.ones_like) if name == "cait" else diagonal_not_masked,
            "the diagonal not masked",
        )
        for name, model in MODELS.items()
    ),
    *(
        Planted(model, plant, name)
        for model in _PATCHES_OF_4.values()
        for plant, name in (
            (shifts_of_one_pixel, "patches shifted by a single pixel in place of half a patch"),
            (channel_first, "patches flattened with the channel first"),
        )
    ),
    Planted(MODELS["cait"], _large_number_on_diagonal, "a large negative number on the diagonal in place of 0"),
    Planted(MODELS["cait"], _minus_infinity_after_mixing, "the diagonal masked by −∞ in place of scores of −1e-9"),
    Planted(MODELS["swin"], _bias_without_shift_mask, "the position bias without the shift mask"),
    Planted(
        MODELS["swin"],
        changed("Add", _DIAGONAL, lambda array: _diagonal(np.zeros_like(array), -np.inf)),
        "no position bias and no shift mask",
    ),
]
