"""Hostile ``model.onnx`` files of a bundle.  Each function takes the graph of a sound bundle, and returns bytes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import onnx
import onnx.parser
from onnx import TensorProto, helper, numpy_helper

Change = Callable[[onnx.ModelProto], onnx.ModelProto | bytes | None]


def _constant(name: str, values: object, dtype: type = np.int64) -> TensorProto:
    return numpy_helper.from_array(np.array(values, dtype), name)


def _before_logits(model: onnx.ModelProto, text: str, *constants: TensorProto) -> None:
    """Rename the logits to ``trained``; nodes in ONNX's text form then compute ``logits`` from ``trained``."""
    for node in model.graph.node:
        node.output[:] = ["trained" if name == "logits" else name for name in node.output]
    added = onnx.parser.parse_graph(f"added (float trained) => (float logits) {{ {text} }}")
    model.graph.node.extend(added.node)
    model.graph.initializer.extend(constants)


def _computed(text: str, *constants: TensorProto, domain: str = "") -> Change:
    """Compute the logits by nodes of ONNX's text form.  domain: of its operators, besides ONNX's own."""

    def change(model: onnx.ModelProto) -> None:
        _before_logits(model, text, *constants)
        if domain:
            model.opset_import.append(helper.make_opsetid(domain, 1))

    return change


def _loop(rounds: str) -> Change:
    body = """body (int64 round, bool condition, float[] value) => (bool more, float[] next)
        { more = Identity (condition) next = Identity (value) }"""
    text = f"logits = Loop <body = {body}> ({rounds}, true, trained)"
    return _computed(text, _constant("rounds", 2**63 - 1), _constant("true", True, bool))


def _added(node: str, *constants: TensorProto) -> Change:
    """Add the maximum of a huge tensor to the logits."""
    text = f"huge = {node} largest = ReduceMax <keepdims = 0> (huge) logits = Add (trained, largest)"
    return _computed(text, *constants)


def _scaled(factor: float) -> Change:
    return _computed("logits = Mul (trained, factor)", _constant("factor", factor, np.float32))


def _external(location: str) -> Change:
    def change(model: onnx.ModelProto) -> None:
        tensor = next(t for t in model.graph.initializer if t.data_type == TensorProto.FLOAT and len(t.dims) == 2)
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", location), ("offset", "0"), ("length", str(4 * int(np.prod(tensor.dims))))):
            tensor.external_data.add(key=key, value=value)

    return change


def _external_constant(model: onnx.ModelProto) -> None:
    """A node without a reader has its value in another file."""
    node = onnx.helper.make_node("Constant", [], ["unread"], value=onnx.numpy_helper.from_array(np.zeros(2), "unread"))
    tensor = node.attribute[0].t
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="other.bin")
    model.graph.node.append(node)


def _external_beside_another(model: onnx.ModelProto) -> None:
    """The first of two constants with the same name is in another file."""
    _external("../../secret")(model)
    outside = next(tensor for tensor in model.graph.initializer if tensor.external_data)
    model.graph.initializer.add().CopyFrom(
        onnx.numpy_helper.from_array(np.zeros(outside.dims, np.float32), outside.name)
    )


def _cycle(model: onnx.ModelProto) -> None:
    model.graph.node[0].input[0] = model.graph.node[-1].output[0]


def _recursive_function(model: onnx.ModelProto) -> None:
    call = helper.make_node("Again", ["a"], ["b"], domain="local")
    model.functions.append(
        helper.make_function("local", "Again", ["a"], ["b"], [call], [helper.make_opsetid("local", 1)])
    )
    _computed("logits = local.Again (trained)", domain="local")(model)


def _nested_graphs(model: onnx.ModelProto) -> None:
    inner = helper.make_graph(
        [helper.make_node("Constant", [], ["v"], value_float=1.0)],
        "g",
        [],
        [helper.make_tensor_value_info("v", TensorProto.FLOAT, [])],
    )
    for _ in range(90):  # protobuf refuses to read more than 100 levels
        node = helper.make_node("If", ["yes"], ["v"], then_branch=inner, else_branch=inner)
        inner = onnx.GraphProto(name="g", output=inner.output)
        inner.node.append(node)
        if inner.ByteSize() > 2_000_000:
            break
    model.graph.node.extend(inner.node)
    _before_logits(model, "logits = Add (trained, v)", _constant("yes", True, bool))


def _deep_bytes(model: onnx.ModelProto) -> bytes:
    """A graph in a node in a graph, 20,000 levels by hand, each with its length."""
    body = b""
    for _ in range(20_000):
        attribute = b"\x32" + varint(len(body)) + body  # AttributeProto.g
        node = b"\x2a" + varint(len(attribute)) + attribute  # NodeProto.attribute
        body = b"\x0a" + varint(len(node)) + node  # GraphProto.node
    return b"\x08\x0a\x3a" + varint(len(body)) + body


def varint(number: int) -> bytes:
    """Return a number in the variable length form of protobuf."""
    pieces = bytearray()
    while number > 127:
        pieces.append(number & 127 | 128)
        number >>= 7
    return bytes([*pieces, number])


def _clear(field: str) -> Change:
    return lambda model: model.graph.ClearField(field)


def _opset(version: int) -> Change:
    def change(model: onnx.ModelProto) -> None:
        model.opset_import[0].version = version

    return change


def _input_dims(*dims: int | str) -> Change:
    def change(model: onnx.ModelProto) -> None:
        shape = model.graph.input[0].type.tensor_type.shape
        shape.ClearField("dim")
        for dim in dims:
            shape.dim.add(**({"dim_param": dim} if isinstance(dim, str) else {"dim_value": dim}))

    return change


def _initializer(**changes: object) -> Change:
    def change(model: onnx.ModelProto) -> None:
        tensor = next(t for t in model.graph.initializer if t.data_type == TensorProto.FLOAT and len(t.dims) == 2)
        for name, value in changes.items():
            if name == "dims":
                tensor.dims[:] = value
            else:
                setattr(tensor, name, value)

    return change


def _second_output(model: onnx.ModelProto) -> None:
    model.graph.output.append(helper.make_tensor_value_info("secret", TensorProto.FLOAT, ["batch", 3]))
    model.graph.node.append(helper.make_node("Identity", [model.graph.output[0].name], ["secret"]))


def _unknown_output(model: onnx.ModelProto) -> None:
    model.graph.output[0].name = "nowhere"


def _sequence(model: onnx.ModelProto) -> None:
    _before_logits(model, "logits = SequenceConstruct (trained)")
    model.graph.output[0].type.CopyFrom(
        helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    )


def _second_input(model: onnx.ModelProto) -> None:
    model.graph.input.append(helper.make_tensor_value_info("more", TensorProto.FLOAT, [1]))


def _name_twice(model: onnx.ModelProto) -> None:
    model.graph.node[1].output[0] = model.graph.node[0].output[0]


def _no_operator(model: onnx.ModelProto) -> None:
    model.graph.node[0].op_type = ""


def _chain(model: onnx.ModelProto) -> None:
    names = ["trained", *(f"n{i}" for i in range(20_000)), "logits"]
    _before_logits(model, " ".join(f"{after} = Abs ({before})" for before, after in pairwise(names)))


def _text(model: onnx.ModelProto) -> None:
    model.doc_string = "\x1b[2J" * 1_000_000


SHAPE = _constant("shape", [2**40])
ONE = _constant("value", [1], np.float32)
TWO = _constant("value", [1, 1], np.float32)
RANGE = [_constant("a", 0, np.float32), _constant("b", 1e12, np.float32), _constant("c", 1, np.float32)]
GRAPHS: dict[str, Change] = {
    "graph: Loop of 2**63 rounds": _loop("rounds"),
    "graph: Loop while true": _loop(""),
    "graph: ConstantOfShape of a terabyte": _added("ConstantOfShape (shape)", SHAPE),
    "graph: Range of 10**12 numbers": _added("Range (a, b, c)", *RANGE),
    "graph: Expand to a terabyte": _added("Expand (value, shape)", SHAPE, ONE),
    "graph: Tile beyond 2**63 elements": _added(
        "Tile (value, times)", _constant("value", [[1, 1]], np.float32), _constant("times", [2**32, 2**32])
    ),
    "graph: Reshape to a shape below 0": _added("Reshape (value, shape)", TWO, _constant("shape", [-7, 2])),
    "graph: Gather beyond the end": _added("Gather (value, place)", TWO, _constant("place", 2**60)),
    "graph: random logits": _computed("noise = RandomNormalLike (trained) logits = Add (trained, noise)"),
    "graph: logits times 1e30": _scaled(1e30),
    "graph: logits times NaN": _scaled(float("nan")),
    "graph: logits times 1.01": _scaled(1.01),
    "graph: weights from /etc/passwd": _external("/etc/passwd"),
    "graph: weights outside the folder": _external("../../secret"),
    "graph: a constant in another file": _external_constant,
    "graph: weights outside the folder, under a name given twice": _external_beside_another,
    "graph: weights from a device without end": _external("/dev/zero"),
    "graph: operator of an unknown domain": _computed("logits = org.example.Shell (trained)", domain="org.example"),
    "graph: operator in Python": _computed(
        'logits = ai.onnx.contrib.PyOp <module = "os", compute = "system"> (trained)', domain="ai.onnx.contrib"
    ),
    "graph: nodes in a circle": _cycle,
    "graph: function that calls itself": _recursive_function,
    "graph: graphs in graphs": _nested_graphs,
    "graph: graphs in graphs beyond what protobuf reads": _deep_bytes,
    "graph: no outputs": _clear("output"),
    "graph: no inputs": _clear("input"),
    "graph: no nodes": _clear("node"),
    "graph: no initializers": _clear("initializer"),
    "graph: a second output": _second_output,
    "graph: a second input": _second_input,
    "graph: an output that no node computes": _unknown_output,
    "graph: an output that is a sequence": _sequence,
    "graph: opset 9999": _opset(9999),
    "graph: opset below 0": _opset(-1),
    "graph: no opset": lambda model: model.ClearField("opset_import"),
    "graph: input of another size": _input_dims("batch", 16, 16, 3),
    "graph: input of a fixed batch": _input_dims(1, 8, 8, 3),
    "graph: input of a shape below 0": _input_dims("batch", -8, 8, 3),
    "graph: input without dimensions": _input_dims(),
    "graph: initializer with other dimensions than its bytes": _initializer(dims=[2**20, 2**20]),
    "graph: initializer with dimensions below 0": _initializer(dims=[-1, 16]),
    "graph: initializer of an unknown type": _initializer(data_type=99),
    "graph: initializer of texts": _initializer(data_type=TensorProto.STRING),
    "graph: two nodes with the same output": _name_twice,
    "graph: node without an operator": _no_operator,
    "graph: chain of 20,000 nodes": _chain,
    "graph: terminal escapes as documentation": _text,
    "graph: text": lambda model: b"this is no graph",
    "graph: empty": lambda model: b"",
    "graph: cut in the middle": lambda model: model.SerializeToString()[: model.ByteSize() // 2],
    "graph: another graph without attention": lambda model: helper.make_model(
        helper.make_graph(
            [helper.make_node("Identity", ["pixels"], ["logits"])],
            "g",
            [helper.make_tensor_value_info("pixels", TensorProto.UINT8, ["b", 8, 8, 3])],
            [helper.make_tensor_value_info("logits", TensorProto.UINT8, ["b", 8, 8, 3])],
        )
    ),
}
"""Name → change of the graph: in place, or the returned graph or bytes."""
