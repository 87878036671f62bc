"""Merge similar tokens of a plain vision transformer, for the first program of a cascade (`bundle.cascades`).

The method is that of Bolya et al., "Token Merging: Your ViT But Faster" (2023), without training. After the first block
and after the first third of the blocks, a quarter of the patches' tokens is merged into others:

    a_i, b_j   the tokens of the patches with even and odd index; m_i, n_j: how many patches each stands for
    b(i)       the j with the largest cos(a_i, b_j)
    merged     the tokens a_i with the largest cos(a_i, b_b(i))
    b_j   ←   (n_j b_j + Σ m_i a_i) / (n_j + Σ m_i), sums over merged i with b(i) = j

Each later attention counts a token as often as it has patches: Softmax(Q Kᵀ/√d + log m) V. Without log m, DINOv2
ViT-S/14 keeps 85 % of its decisions in float32, with it 98 %. Other than in the paper, the tokens themselves are
compared, not the keys, and a mean over the tokens counts each token once. The tokens before those of the patches, such
as the class token, are left alone. All shapes are static but the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gmmvit_deploy.errors import ExportError
from gmmvit_deploy.graphs.declared import SHAPE_OPERATORS, declare, declared_attention
from gmmvit_deploy.graphs.roles import roles_of
from gmmvit_deploy.graphs.wiring import add_constant, inner_shape, input_of, stored, values_of

if TYPE_CHECKING:
    import onnx_ir as ir

MIN_PATCHES = 196
"""Of a ViT with patches of 16 pixels at 224 pixels: fewer tokens leave little time to gain."""
_OF_THE_GRID = frozenset({"mask", "score_bias", "rotation", "mixing", "depthwise", "unknown"})
"""Roles of operators that belong to positions, or whose meaning for merged tokens is not known."""
_ONES = """
  batch = Shape <start = 0, end = 1> (tokens)
  shape = Concat <axis = 0> (batch, size)
  sizes = ConstantOfShape <value = float[1] {1.0}> (shape)
"""
_MERGE = """
merge (float[B, N, C] tokens{given}) => (float[B, M, C] left, float[B, Q, 1] left_sizes, float[B, 1, 1, M] log_sizes)
<
  int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] two = {{2}}, int64[1] last = {{-1}},
  int64[1] end = {{{tokens}}}, int64[2] size = {{{patches}, 1}}, int64[1] even = {{{before}}}, int64[1] odd = {{{odd}}},
  int64[1] sources = {{{sources}}}, int64[2] counts = {{{merge}, {kept}}}, int64[6] front = {{0, 0, {before}, 0, 0, 0}},
  int64[1, {targets}, 1] numbers = {{{numbers}}}
>
{{
  {ones}
  a = Slice (tokens, even, end, one, two)
  b = Slice (tokens, odd, end, one, two)
  size_a = Slice (sizes, zero, end, one, two)
  size_b = Slice (sizes, one, end, one, two)
  unit_a = LpNormalization <axis = -1, p = 2> (a)
  unit_b = LpNormalization <axis = -1, p = 2> (b)
  columns = Transpose <perm = [0, 2, 1]> (unit_b)
  cosines = MatMul (unit_a, columns)
  largest = ReduceMax <keepdims = 0> (cosines, last)
  nearest = ArgMax <axis = -1, keepdims = 0> (cosines)
  ordered, order = TopK (largest, sources)
  first, others = Split <axis = 1> (order, counts)
  merged = Unsqueeze (first, last)
  kept = Unsqueeze (others, last)
  target = GatherND <batch_dims = 1> (nearest, merged)
  row = Unsqueeze (target, one)
  equal = Equal (row, numbers)
  assigned = Cast <to = 1> (equal)
  merged_a = GatherND <batch_dims = 1> (a, merged)
  merged_size = GatherND <batch_dims = 1> (size_a, merged)
  weighted_a = Mul (merged_a, merged_size)
  weighted_b = Mul (b, size_b)
  added = MatMul (assigned, weighted_a)
  sum = Add (weighted_b, added)
  added_size = MatMul (assigned, merged_size)
  sum_size = Add (size_b, added_size)
  mean = Div (sum, sum_size)
  kept_a = GatherND <batch_dims = 1> (a, kept)
  kept_size = GatherND <batch_dims = 1> (size_a, kept)
  {prefix}
  left_sizes = Concat <axis = 1> (kept_size, sum_size)
  logs = Log (left_sizes)
  row_of_logs = Transpose <perm = [0, 2, 1]> (logs)
  all_logs = Pad (row_of_logs, front)
  log_sizes = Unsqueeze (all_logs, one)
}}
"""


def why_not_merged(graph: ir.Graph) -> str:
    """Return why no tokens of a network can be merged, or ""."""
    found = sorted(_OF_THE_GRID.intersection(roles_of(graph).values()))
    if found:
        return f"no tokens are merged: operators of the role {found[0]} belong to positions"
    patches, places = _patches(graph), _places(graph)
    same = len({_tokens(place) for place in places}) == 1 and patches <= _tokens(places[0])
    if not patches or not same or not all(_is_the_only_link(graph, place) for place in places):
        return "no tokens are merged: the network is no plain vision transformer"
    if patches < MIN_PATCHES:
        return f"no tokens are merged: {patches} patches are few; merging gains time from {MIN_PATCHES} on"
    return ""


def with_merged_tokens(model: ir.Model) -> ir.Model:
    """Return the graph of a plain vision transformer with merged tokens.

    model: a float32 graph, whose nodes declare their roles.  Errors: ExportError with the reason of `why_not_merged`.
    """
    from onnx_ir.passes.common import ShapeInferencePass

    if why := why_not_merged(model.graph):
        raise ExportError(why)
    out = model.clone()
    graph, patches, places = out.graph, _patches(out.graph), _places(out.graph)
    nodes, tokens = list(graph), _tokens(places[0])
    before, merge = tokens - patches, patches // 4
    ends = [*(nodes.index(_producer(place)) for place in places), len(nodes)]
    sizes: ir.Value | None = None
    for number, place in enumerate(places):
        name = f"merged_tokens.{number + 1}"
        sizes, log_sizes = _merge(graph, place, sizes, before=before, patches=patches, merge=merge, name=name)
        patches -= merge
        later = nodes[ends[number] + 1 : ends[number + 1] + 1]
        _shorten(graph, later, tokens, before + patches)
        for softmax in later:
            if softmax.op_type == "Softmax":
                _count_patches(softmax, log_sizes)
    ShapeInferencePass()(out)
    return out


def _places(graph: ir.Graph) -> list[ir.Value]:
    """Return the outputs of the first block, and of the last block of the first third; none below four blocks."""
    roles = roles_of(graph)
    sums = [node.outputs[0] for node in graph if roles[node] == "residual"]  # two of each block
    blocks = sums[1::2]
    return [blocks[0], blocks[-(-len(blocks) // 3) - 1]] if len(blocks) > 3 else []


def _patches(graph: ir.Graph) -> int:
    """Return the number of patches that the first convolution cuts; 0 without one."""
    roles = roles_of(graph)
    for node in graph:
        if node.op_type == "Conv" and roles[node] == "embedding" and (shape := inner_shape(node.outputs[0])):
            return shape[-2] * shape[-1]
    return 0


def _tokens(value: ir.Value) -> int:
    """Return N of tokens (B, N, C); 0 for another tensor."""
    shape = inner_shape(value)
    return shape[0] if shape is not None and len(shape) == 2 else 0


def _producer(value: ir.Value) -> ir.Node:
    node = value.producer()
    if node is None:
        raise ValueError(f"{value.name}: expected the output of a node")
    return node


def _is_the_only_link(graph: ir.Graph, value: ir.Value) -> bool:
    """Return whether the nodes after ``value`` read no other tensor (B, …) that the nodes before it compute."""
    nodes = list(graph)
    later = set(nodes[nodes.index(_producer(value)) + 1 :])
    read = {one for node in later for one in node.inputs if one is not None and one is not value}
    batch = value.shape[0] if value.shape is not None else None
    return not any(
        one.shape is not None and len(one.shape) > 1 and one.shape[0] == batch
        for one in read
        if one.producer() is not None and one.producer() not in later
    )


def _shorten(graph: ir.Graph, nodes: list[ir.Node], tokens: int, left: int) -> None:
    """Let nodes that reshape (B, tokens, …) reshape (B, left, …), and forget the shapes of what the nodes compute."""
    for node in nodes:
        shape = values_of(node.inputs[1]) if node.op_type == "Reshape" else None
        if shape is not None and len(shape) > 1 and shape[1] == tokens:
            name = f"{input_of(node, 1).name}.{left}_tokens"
            short = graph.initializers.get(name)
            if short is None:
                short = add_constant(graph, name, np.array([shape[0], left, *shape[2:]]))
            node.replace_input_with(1, short)
        for value in node.outputs:
            if not value.is_graph_output():
                value.shape = None


def _count_patches(softmax: ir.Node, log_sizes: ir.Value) -> None:
    """Add the logarithm of each key's number of patches to the scores."""
    import onnx_ir as ir

    name = f"{softmax.name}.log_sizes"
    scores = ir.Value(name=name, type=softmax.outputs[0].type)
    add = ir.node("Add", [softmax.inputs[0], log_sizes], outputs=[scores], name=f"{name}/Add")
    softmax.prepend(declare(add, "score_bias", attention=declared_attention(softmax)))
    softmax.replace_input_with(0, scores)


def _merge(
    graph: ir.Graph, tokens: ir.Value, sizes: ir.Value | None, *, before: int, patches: int, merge: int, name: str
) -> tuple[ir.Value, ir.Value]:
    """Merge tokens (B, N, C), of which the last ``patches`` belong to patches, for all nodes that read them.

    before: the number of tokens before these.  sizes: (B, patches, 1), the number of patches of each token; None for 1.
    merge: the number of tokens to merge.  name: the start of all new names.
    Returns the sizes of the patches' tokens that are left, and the logarithms of all sizes (B, 1, 1, N − merge).
    """
    import onnx_ir as ir
    from onnx import parser

    targets = patches // 2
    joined = "left = Concat <axis = 1> ({}kept_a, mean)"
    text = _MERGE.format(
        given="" if sizes is None else ", float[B, P, 1] sizes",
        ones=_ONES if sizes is None else "",
        prefix=f"prefix = Slice (tokens, zero, even, one) {joined.format('prefix, ')}" if before else joined.format(""),
        tokens=before + patches,
        patches=patches,
        before=before,
        odd=before + 1,
        sources=patches - targets,
        merge=merge,
        kept=patches - targets - merge,
        targets=targets,
        numbers=", ".join(map(str, range(targets))),
    )
    part: Any = ir.from_proto(parser.parse_graph(text))
    made: dict[str | None, ir.Value | None] = {"tokens": tokens, "sizes": sizes}
    made |= {key: add_constant(graph, f"{name}.{key}", stored(value)) for key, value in part.initializers.items()}
    last, readers = _producer(tokens), list(tokens.uses())
    for node in part:
        inputs = [made[value.name] for value in node.inputs if value is not None]
        outputs = [ir.Value(name=f"{name}.{value.name}") for value in node.outputs]
        attributes = tuple(node.attributes.values())
        copy = ir.Node("", node.op_type, inputs, attributes, outputs=outputs, name=f"{outputs[0].name}/{node.op_type}")
        made |= {value.name: output for value, output in zip(node.outputs, outputs, strict=True)}
        last.append(declare(copy, "shape" if node.op_type in SHAPE_OPERATORS else "pooling"))
        last = copy
    left, left_sizes, log_sizes = (made[key] for key in ("left", "left_sizes", "log_sizes"))
    if left is None or left_sizes is None or log_sizes is None:
        raise ValueError("the part has three outputs")
    for reader, index in readers:
        reader.replace_input_with(index, left)
    return left_sizes, log_sizes
