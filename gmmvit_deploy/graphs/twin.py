"""The twin of a graph with M = 1: what the same network would cost without its masks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gmmvit_deploy.graphs.rewrite import rewrite_graph
from gmmvit_deploy.graphs.roles import attentions_of

if TYPE_CHECKING:
    from onnx import ModelProto

__all__ = ["with_masks_of_one"]


def with_masks_of_one(proto: ModelProto) -> ModelProto:
    """Every mask becomes a scalar of its type, as 1/√d stands in a plain model; all else stays.

    The scalar's value does not matter for what it costs. Not for answers.
    """
    import numpy as np
    from onnx import numpy_helper

    out = type(proto)()
    out.CopyFrom(proto)
    masks = {attention.mask for attention in attentions_of(out.graph) if attention.mask}
    types = {one.name: numpy_helper.to_array(one).dtype for one in out.graph.initializer if one.name in masks}
    for node in out.graph.node:
        for index, name in enumerate(node.input):
            if name in masks:
                node.input[index] = f"{name}.one"
    kept = [one for one in out.graph.initializer if one.name not in masks]
    kept += [numpy_helper.from_array(np.asarray(0.25, kind), f"{name}.one") for name, kind in types.items()]
    rewrite_graph(out.graph, out.graph.node, kept)
    return out
