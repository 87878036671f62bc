"""Rewrite bfloat16 nodes, and activations that are quantised while running, as float32 nodes with the same roundings.

A runtime that cannot compute in this way can run the rewritten graph. `runtimes/programs/emulated_precision.py` runs
the rewritten graph in ONNX Runtime.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gmmvit_deploy.graphs.quantize import DYNAMIC, output_axis
from gmmvit_deploy.graphs.wiring import add_constant, input_of, made_by, stored

if TYPE_CHECKING:
    import onnx_ir as ir


def without_bfloat16(model: ir.Model) -> ir.Model:
    """Return a graph with float32 nodes in place of bfloat16 nodes, and Cast nodes that round their results.

    A graph without bfloat16 constants is returned unchanged.
    """
    import onnx_ir as ir
    from onnx_ir.passes.common import ShapeInferencePass

    bfloat16 = ir.DataType.BFLOAT16
    if not any(value.dtype == bfloat16 for value in model.graph.initializers.values()):
        return model
    out = model.clone()
    ShapeInferencePass()(out)
    for value in list(out.graph.initializers.values()):
        if value.dtype == bfloat16:
            value.replace_all_uses_with(add_constant(out.graph, str(value.name), stored(value).astype(np.float32)))
    for node in list(out.graph):
        for value in node.outputs:
            if value.dtype == bfloat16:
                _round(node, value)
    return out


def _round(node: ir.Node, value: ir.Value) -> None:
    """Let a node compute ``value`` in float32, and round it with Cast nodes after the node."""
    import onnx_ir as ir

    name, uses, source = value.name, list(value.uses()), value
    value.name, value.type = f"{name}.exact", ir.TensorType(ir.DataType.FLOAT)
    if node.op_type == "Cast":
        node.attributes.add(ir.AttrInt64("to", ir.DataType.FLOAT))
    for kind, output in ((ir.DataType.BFLOAT16, f"{name}.bf16"), (ir.DataType.FLOAT, name)):
        cast = ir.node("Cast", [source], {"to": kind}, outputs=[ir.Value(name=output, type=ir.TensorType(kind))])
        node.append(cast)
        node, source = cast, cast.outputs[0]
    for reader, index in uses:
        reader.replace_input_with(index, source)


def with_quantized_activations(model: ir.Model) -> ir.Model:
    """Return a graph that quantises the activations of a graph in the dynamic form (`graphs.quantize`).

    Of each activation x, the g columns of a group have the scale s = max|x| / 127, and become s · round(x / s), as
    OpenVINO computes them; it does not quantise an activation with fewer than g columns.
    A graph in another form is returned unchanged.
    """
    columns = int(model.metadata_props.get(DYNAMIC, 0))
    if not columns:
        return model
    out = model.clone()
    for node in out.graph:
        weight = made_by(node.inputs[1], "DequantizeLinear") if node.op_type in ("MatMul", "Gemm") else None
        if weight is None or made_by(node.inputs[0], "DequantizeLinear") is not None:
            continue
        width = stored(weight.inputs[0]).shape[1 - output_axis(node)]
        if width >= columns:
            node.replace_input_with(0, _rounded_groups(out.graph, node, width, columns))
    return out


def _rounded_groups(graph: ir.Graph, reader: ir.Node, width: int, columns: int) -> ir.Value:
    """Put nodes before ``reader`` that quantise its first input (…, width) in groups; return the quantised tensor."""
    import onnx_ir as ir

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

    stem = f"{reader.name}.input"
    tensors = {key: add_constant(graph, f"{stem}.{key}", value) for key, value in values.items()}
    tensors["input"] = input_of(reader, 0)
    for kind, read, made in steps:
        name = stem if made == "output" else f"{stem}.{made}"
        node = ir.node(kind, [tensors[key] for key in read], outputs=[ir.Value(name=name)])
        reader.prepend(node)
        tensors[made] = node.outputs[0]
    return tensors["output"]
