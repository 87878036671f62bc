"""Replace each attention of an ONNX graph by a node that this project's CPU kernel computes inside ONNX Runtime.

    Split, Reshape, Transpose, MatMul, Mul by the mask, Add, Softmax, MatMul, Transpose, Reshape  →  MaskedAttention

`masked_attention.c` computes the node MaskedAttention in float32, in a single pass over data in the processor's cache.
`matcher.py` decides which attentions are replaced, and gives the reason why an attention is not replaced. ONNX Runtime
computes all other nodes with its built-in operators.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gmmvit_deploy.runtimes.kernels.matcher import MatchedAttention, Refusal, attentions_in
from gmmvit_deploy.runtimes.kernels.onnx_view import OnnxView
from gmmvit_deploy.runtimes.kernels.prepared_masks import prepared_bias, prepared_mask

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto

__all__ = ["DOMAIN", "attentions_of_kernel", "with_fused_attention"]

DOMAIN = "gmmvit"


def attentions_of_kernel(proto: ModelProto) -> list[MatchedAttention | Refusal]:
    """Return for each softmax of a graph either the attention that the kernel computes, or a refusal with a reason."""
    return attentions_in(OnnxView(proto.graph))


def with_fused_attention(proto: ModelProto) -> tuple[ModelProto, int]:
    """Copy a graph, and replace each attention that the kernel computes by a single node.

    Returns (the new graph, the number of replaced attentions).
    """
    from onnx import helper, numpy_helper

    out = type(proto)()
    out.CopyFrom(proto)
    view = OnnxView(out.graph)
    attentions = [match for match in attentions_in(view) if isinstance(match, MatchedAttention)]
    if not attentions:
        return out, 0
    replaced = {}
    for index, attention in enumerate(attentions):
        mask = None if attention.mask is None else prepared_mask(attention.mask, "f32")
        bias = None
        if attention.bias is not None:
            tokens = attention.queries, attention.tokens
            bias = prepared_bias(attention.bias, attention.heads, tokens, attention.windows)
        constants = [mask and mask.numbers, bias, *(attention.mixing or (None, None))]
        names = ["" if constant is None else f"{DOMAIN}.{index}.{place}" for place, constant in enumerate(constants)]
        out.graph.initializer.extend(
            numpy_helper.from_array(constant, name)
            for name, constant in zip(names, constants, strict=True)
            if constant is not None
        )
        query, key, value = attention.parts
        last = view.wiring.maker[attention.last]
        replaced[attention.last] = helper.make_node(
            "MaskedAttention",
            [query.source, key.source, value.source, *names],
            list(last.output),
            name=last.name,
            domain=DOMAIN,
            heads=attention.heads,
            queries=attention.queries,
            n=attention.tokens,
            mask_heads=1 if mask is None else len(mask.numbers),
            windows=1 if bias is None else len(bias),
            bias_heads=1 if bias is None else bias.shape[1],
            d=attention.head_dim,
            grid=mask.grid if mask else 0,
            q_column=query.column,
            k_column=key.column,
            v_column=value.column,
            scale=1.0 if mask else attention.scale / math.log(2),
        )
    nodes = [replaced.get(node.output[0], node) for node in out.graph.node]
    _keep_what_is_read(out.graph, nodes)
    out.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return out, len(attentions)


def _keep_what_is_read(graph: GraphProto, nodes: list[NodeProto]) -> None:
    """Set the graph's nodes to ``nodes``, and remove the nodes and constants on which no output depends."""
    read = {value.name for value in graph.output}
    kept = []
    for node in reversed(nodes):
        if read.intersection(node.output):
            kept.append(node)
            read.update(node.input)
    constants = [constant for constant in graph.initializer if constant.name in read]
    made = {name for node in kept for name in node.output}
    values = [value for value in graph.value_info if value.name in made]
    kept.reverse()
    del graph.node[:], graph.initializer[:], graph.value_info[:]
    graph.node.extend(kept)
    graph.initializer.extend(constants)
    graph.value_info.extend(values)
