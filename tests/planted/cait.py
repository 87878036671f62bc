"""Mistakes with the class blocks and the head mixing of CaiT, planted in exported graphs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.planted.graph import GraphCopy, Planted, changed
from tests.planted.locality import MODELS, channel_first

_ATTENTION = r"class_blocks\.\d+\.attention\.inner"


def _class_token_among_keys(graph: GraphCopy) -> None:
    """Concatenate the normed class token and the patches, as vit-pytorch does, in a graph of the authors' network."""
    for node in graph.find("MatMul", rf"{_ATTENTION}\.key_value"):
        query = graph.only("MatMul", graph.module(node).replace("key_value", "query"))
        node.input[0] = graph.insert(node, "Concat", query.input[0], node.input[0], axis=1)
    _set_keys(graph, 1)


def _patches_alone_as_keys(graph: GraphCopy) -> None:
    for concat in graph.find("Concat", r"class_blocks\.\d+\.attention"):
        for node in graph.find("MatMul", rf"{graph.module(concat)}\.inner\.key_value"):
            node.input[0] = concat.input[1]
    _set_keys(graph, -1)


def _set_keys(graph: GraphCopy, more: int) -> None:
    """Change the number of keys in the shapes of K, V and the scores of the class blocks."""
    grid = graph.model.get_parameter("position_embedding").shape[1]
    keys = grid if more == 1 else grid + 1
    for module, place in ((_ATTENTION, 1), (rf"{_ATTENTION}\.scores\.(before|after)\.mixing", -1)):
        nodes = [node for node in graph.find("Reshape", module) if graph.constant(node)[place] == keys]
        assert nodes
        for node in nodes:
            shape = graph.constant(node)
            shape[place] += more
            graph.feed(node, shape)


def _transposed(sides: str) -> Callable[[GraphCopy], None]:
    """sides: of softmax."""
    return changed("MatMul", rf".*\.scores\.({sides})\.mixing", np.transpose)


VIT_PYTORCH = "vp_cait"
_CLASS_BLOCKS = "the class token added to the keys of the class blocks, or left out of the keys"

CASES = [
    Planted(MODELS["cait"], _class_token_among_keys, _CLASS_BLOCKS),
    Planted(VIT_PYTORCH, _patches_alone_as_keys, _CLASS_BLOCKS),
    Planted(VIT_PYTORCH, channel_first, "patches flattened with the channel first"),
    Planted(VIT_PYTORCH, _transposed("before|after"), "head mixing transposed"),
    Planted(MODELS["cait"], _transposed("before|after"), "head mixing transposed"),
    Planted(MODELS["cait"], _transposed("before"), "head mixing before softmax transposed"),
    Planted(MODELS["cait"], _transposed("after"), "head mixing after softmax transposed"),
]
