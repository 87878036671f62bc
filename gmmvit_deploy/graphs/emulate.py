"""Rewrite bfloat16 nodes, and activations that are quantised while running, as float32 nodes with the same roundings.

A runtime that cannot compute in this way can run the rewritten graph. `runtimes/programs/emulated_precision.py` runs
the rewritten graph in ONNX Runtime.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gmmvit_deploy.graphs.quantize import DYNAMIC, output_axis
from gmmvit_deploy.graphs.weights import without_weights
from gmmvit_deploy.graphs.wiring import Wiring, copy_of, rewrite_graph

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, TensorProto


def without_bfloat16(proto: ModelProto) -> ModelProto:
    """Return a graph with float32 nodes in place of bfloat16 nodes, and Cast nodes that round their results.

    A graph without bfloat16 constants is returned unchanged.
    """
    from onnx import TensorProto, helper, numpy_helper, shape_inference

    if not any(constant.data_type == TensorProto.BFLOAT16 for constant in proto.graph.initializer):
        return proto
    out = shape_inference.infer_shapes(without_weights(proto), strict_mode=True)
    rounded = {value.name for value in out.graph.value_info if value.type.tensor_type.elem_type == TensorProto.BFLOAT16}
    nodes = []
    for node in out.graph.node:
        names = [name for name in node.output if name in rounded]
        sources = {name: f"{name}.exact" for name in names}
        if names and node.op_type == "Cast":
            sources = {names[0]: node.input[0]}
        else:
            outputs = [sources.get(name, name) for name in node.output]
            del node.output[:]
            node.output.extend(outputs)
            nodes.append(node)
        for name, source in sources.items():
            nodes += [
                helper.make_node("Cast", [source], [f"{name}.bf16"], name=f"{name}/round", to=TensorProto.BFLOAT16),
                helper.make_node("Cast", [f"{name}.bf16"], [name], name=f"{name}/widen", to=TensorProto.FLOAT),
            ]
    constants = [
        numpy_helper.from_array(numpy_helper.to_array(constant).astype(np.float32), constant.name)
        if constant.data_type == TensorProto.BFLOAT16
        else constant
        for constant in proto.graph.initializer
    ]
    rewrite_graph(out.graph, nodes, constants)
    return out


def with_quantized_activations(proto: ModelProto) -> ModelProto:
    """Return a graph that quantises the activations of a graph in the dynamic form (`graphs.quantize`).

    Of each activation x, the g columns of a group have the scale s = max|x| / 127, and become s · round(x / s), as
    OpenVINO computes them; it does not quantise an activation with fewer than g columns.
    A graph in another form is returned unchanged.
    """
    columns = next((int(note.value) for note in proto.metadata_props if note.key == DYNAMIC), 0)
    if not columns:
        return proto
    out = copy_of(proto)
    wiring = Wiring(out.graph)
    nodes: list[NodeProto] = []
    constants: list[TensorProto] = []
    for node in out.graph.node:
        weight = wiring.maker.get(node.input[1]) if node.op_type in ("MatMul", "Gemm") else None
        static = (made := wiring.maker.get(node.input[0])) is not None and made.op_type == "DequantizeLinear"
        if weight is not None and weight.op_type == "DequantizeLinear" and not static:
            width = wiring.initializers[weight.input[0]].dims[1 - output_axis(node)]
            if width >= columns:
                more, values = _rounded_groups(node.input[0], f"{node.name}.input", width, columns)
                nodes += more
                constants += values
                node.input[0] = f"{node.name}.input"
        nodes.append(node)
    rewrite_graph(out.graph, nodes, [*out.graph.initializer, *constants])
    return out


def _rounded_groups(name: str, rounded: str, width: int, columns: int) -> tuple[list[NodeProto], list[TensorProto]]:
    """Return the nodes from ``name`` (…, width) to ``rounded``, which quantise it in groups, and their constants."""
    from onnx import helper, numpy_helper

    padding = -width % columns
    values = {
        "rows": np.array([-1, width]),
        "padding": np.array([0, 0, 0, padding]),
        "groups": np.array([-1, columns]),
        "padded": np.array([-1, width + padding]),
        "axis": np.array([1]),
        "first": np.array([0]),
        "width": np.array([width]),
        "largest": np.array(127, np.float32),
        "tiny": np.array(np.finfo(np.float32).tiny),
    }
    steps = [
        ("Shape", ["input"], "shape"),
        ("Reshape", ["input", "rows"], "flat"),
        ("Pad", ["flat", "padding"], "wide"),
        ("Reshape", ["wide", "groups"], "grouped"),
        ("Abs", ["grouped"], "abs"),
        ("ReduceMax", ["abs", "axis"], "max"),
        ("Div", ["max", "largest"], "step"),
        ("Max", ["step", "tiny"], "scale"),
        ("Div", ["grouped", "scale"], "scaled"),
        ("Round", ["scaled"], "integers"),
        ("Mul", ["integers", "scale"], "values"),
        ("Reshape", ["values", "padded"], "long"),
        ("Slice", ["long", "first", "width", "axis"], "short"),
        ("Reshape", ["short", "shape"], "output"),
    ]

    def full(short: str) -> str:
        return {"input": name, "output": rounded}.get(short, f"{rounded}.{short}")

    nodes = [helper.make_node(kind, [full(one) for one in read], [full(made)]) for kind, read, made in steps]
    return nodes, [numpy_helper.from_array(value, full(key)) for key, value in values.items()]
