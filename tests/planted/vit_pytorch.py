"""Mistakes in vit-pytorch's networks and in the pooling of a ViT, planted in exported graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx

from gmmvit_deploy.models.specs import MaskSpec
from tests.models.families.small_models import Small
from tests.planted.graph import GraphCopy, Other, Planted, changed
from tests.planted.locality import MODELS, channel_first, diagonal_not_masked, family, other_temperature

REATTENTION = Small(family("vit_pytorch"), "plain")
SMALL_DATA = "vp_spt_lsa"


_VIT = family("vit")
POOLS_ALL = Other(_VIT, "plain", "pools-all", replace(_VIT.small(MaskSpec()), pools_all=True))
"""A ViT in vit-pytorch's PreNorm style, whose file takes ``--set pool=mean``."""


# ---- pooling -------------------------------------------------------------------------------------------------------

_MODEL_AND_BLOCKS = r"model|blocks\.\d+"


def _class_token_for_mean(graph: GraphCopy) -> None:
    """Read the first token in place of each mean over the tokens: in the narrowed last block and before the head."""
    for node in graph.find("ReduceMean", _MODEL_AND_BLOCKS):
        (keeps,) = (attribute.i for attribute in node.attribute if attribute.name == "keepdims")
        if keeps:
            graph.become(node, "Slice", node.input[0], np.array([0]), np.array([1]), np.array([1]))
        else:
            graph.become(node, "Gather", node.input[0], np.array(0), axis=1)


def _mean_for_class_token(graph: GraphCopy) -> None:
    """Compute all tokens in the last block, and their mean before the head."""
    last = max(graph.module(node) for node in graph.find("Slice", r"blocks\.\d+"))
    cut = graph.only("Slice", last)
    graph.become(cut, "Identity", cut.input[0])
    pick = graph.only("Gather", "model")
    graph.become(pick, "ReduceMean", pick.input[0], np.array([1]), keepdims=0)


# ---- Re-attention --------------------------------------------------------------------------------------------------

_MIXING = r".*\.scores\.after\.mixing"


def _mixings(graph: GraphCopy) -> list[tuple[onnx.NodeProto, np.ndarray]]:
    """Return (node, trained weight [old head, new head]) of each head mixing.  A node has the transposed weight."""
    nodes = graph.find("MatMul", _MIXING)
    return [(node, graph.trained[f"{graph.module(node)}.weight"]) for node in nodes]


def _mixing_transposed(graph: GraphCopy) -> None:
    """Transpose the trained matrix, and centre the rows of the result, as folding does."""
    for node, weight in _mixings(graph):
        np.testing.assert_allclose(graph.constant(node).T, weight - weight.mean(1, keepdims=True), atol=1e-6)
        graph.feed(node, (weight.T - weight.T.mean(1, keepdims=True)).T)


def _no_division(graph: GraphCopy) -> None:
    for node in graph.find("Div", r".*\.scores\.after\.norm"):
        graph.become(node, "Identity", node.input[0])


def _no_norm(graph: GraphCopy) -> None:
    """Leave the centring, the division and the affine out.  Folding has moved the affine to V."""
    _no_division(graph)
    for node, weight in _mixings(graph):
        graph.feed(node, weight.T)
        attention = graph.module(node).removesuffix(".scores.after.mixing")
        values = graph.only("MatMul", rf"{attention}\.qkv")
        affine = graph.trained[f"{attention}.scores.after.norm.weight"]
        columns = graph.constant(values)
        count = columns.shape[1] // 3
        columns[:, -count:] /= np.repeat(affine, count // len(affine))
        graph.feed(values, columns)
        graph.change(graph.only("Mul", attention), np.zeros_like)


def _norm_over_keys(graph: GraphCopy) -> None:
    """Normalise the mixed weights over the keys, with the weights as trained."""
    for node, weight in _mixings(graph):
        graph.feed(node, weight.T)
    for node in graph.find("Div", r".*\.scores\.after\.norm"):
        tokens = graph.model.get_parameter("position_embedding").shape[1]
        graph.become(
            node, "LayerNormalization", node.input[0], np.ones(tokens), np.zeros(tokens), axis=-1, epsilon=1e-5
        )


def _queries_times(power: int) -> Callable[[GraphCopy], None]:
    """Multiply the weights that compute Q, which hold 1/√d, by d^(power / 2)."""

    def plant(graph: GraphCopy) -> None:
        factor = graph.model.spec.head_dim ** (power / 2)
        for node in graph.find("MatMul", r".*\.attention\.qkv"):
            columns = graph.constant(node)
            columns[:, : columns.shape[1] // 3] *= factor
            graph.feed(node, columns)

    return plant


_POOLING = "class token and mean of the tokens exchanged in the pooling"
_CHANNEL_FIRST = "patches flattened with the channel first"

CASES = [
    Planted(REATTENTION, _class_token_for_mean, _POOLING),
    Planted(POOLS_ALL, _class_token_for_mean, _POOLING),
    Planted(MODELS["vit"], _mean_for_class_token, _POOLING),
    Planted(SMALL_DATA, _mean_for_class_token, _POOLING),
    *(Planted(model, channel_first, _CHANNEL_FIRST) for model in (REATTENTION, POOLS_ALL, SMALL_DATA)),
    Planted(REATTENTION, _mixing_transposed, "the head mixing transposed"),
    Planted(
        REATTENTION,
        changed("MatMul", _MIXING, np.transpose),
        "the head mixing transposed after folding has centred the head mixing",
    ),
    Planted(REATTENTION, _no_norm, "no normalisation over the heads"),
    Planted(REATTENTION, _no_division, "no division by the standard deviation over the heads"),
    Planted(REATTENTION, _norm_over_keys, "the normalisation over the keys in place of the heads"),
    Planted(
        REATTENTION,
        changed("ReduceMean", r".*\.scores\.after\.norm", lambda axes: np.array([-1]), 1),
        "a division by the root mean square over the keys in place of the heads",
    ),
    Planted(REATTENTION, _queries_times(1), "1/√d missing"),
    Planted(REATTENTION, _queries_times(-1), "1/√d applied twice"),
    Planted(SMALL_DATA, diagonal_not_masked, "the diagonal not masked"),
    *(
        Planted(SMALL_DATA, other_temperature(other), name)
        for name, other in (
            ("the learned temperature missing", lambda learned, usual: np.ones_like(learned)),
            ("1/√d in place of the learned temperature", lambda learned, usual: np.full_like(learned, usual)),
            ("the temperature's logarithm in place of the temperature", lambda learned, usual: np.log(learned)),
            ("the scores divided by the learned temperature", lambda learned, usual: 1 / learned),
        )
    ),
]
