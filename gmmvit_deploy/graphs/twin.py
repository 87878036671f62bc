"""Make the twin of a graph: the same graph, in which a scalar replaces every mask.

The masks cost the difference between the time of the graph and the time of its twin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gmmvit_deploy.graphs.rewrite import rewrite_graph
from gmmvit_deploy.graphs.roles import attentions_of

if TYPE_CHECKING:
    from onnx import ModelProto

__all__ = ["with_masks_of_one"]


def with_masks_of_one(proto: ModelProto) -> ModelProto:
    """Return a graph in which a scalar replaces every mask.

    A model without masks also multiplies the scores by a scalar, 1/√d for the head dim d. The scalar of this function
    has the data type of the mask and an arbitrary value, so the logits are meaningless. Use the graph only to measure
    sizes and times.
    """
    import numpy as np
    from onnx import numpy_helper

    out = type(proto)()
    out.CopyFrom(proto)
    masks = {attention.mask for attention in attentions_of(out.graph) if attention.mask}
    types = {
        constant.name: numpy_helper.to_array(constant).dtype
        for constant in out.graph.initializer
        if constant.name in masks
    }
    for node in out.graph.node:
        for index, name in enumerate(node.input):
            if name in masks:
                node.input[index] = f"{name}.one"
    kept = [constant for constant in out.graph.initializer if constant.name not in masks]
    kept += [numpy_helper.from_array(np.asarray(0.25, kind), f"{name}.one") for name, kind in types.items()]
    rewrite_graph(out.graph, out.graph.node, kept)
    return out
