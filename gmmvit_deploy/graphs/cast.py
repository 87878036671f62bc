"""Cast a float32 graph to the data types of a precision.

Each node has a role, which says what the node is for. The precision policy assigns a data type to each role, and the
node computes in this type. A constant is stored in every type in which a node reads the constant. Where a node reads a
computed tensor in another type, a Cast node is added. A node that only moves values keeps the type of its input.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from gmmvit_deploy.errors import ExportError
from gmmvit_deploy.graphs.declared import declare, declared_attention
from gmmvit_deploy.graphs.roles import roles_of
from gmmvit_deploy.graphs.wiring import add_constant, remove_unused, stored
from gmmvit_deploy.inference.precision import ROLES, ElementType, Precision, QuantizedType, Role, element_type

if TYPE_CHECKING:
    import onnx_ir as ir

_FIRST_BF16_OPSET = 22


def numpy_type(kind: ElementType | QuantizedType) -> np.dtype[Any]:
    """Return the numpy or ml_dtypes type for the name of a data type."""
    import ml_dtypes  # noqa: F401  # numpy knows its types by their names from then on

    return np.dtype(kind)


def cast_graph(model: ir.Model, precision: Precision) -> ir.Model:
    """Return a new graph in this precision, whose inputs and outputs have the same data types as before.

    Errors: ExportError when a declared role is not in the policy, when a finite constant overflows in its new type, or
    when an output would not be float32.
    """
    out = model.clone()
    types: dict[Role, ElementType] = {role: element_type(role, precision) for role in ROLES if role != "shape"}
    _Cast(out.graph, types).run()
    if "bfloat16" in types.values():
        # Opset 22 is the first with bfloat16 convolutions. Opsets 21 and 22 change no other operator of the graphs.
        out.opset_imports[""] = max(_FIRST_BF16_OPSET, out.opset_imports[""])
    remove_unused(out)
    return out


class _Cast:
    def __init__(self, graph: ir.Graph, types: Mapping[Role, ElementType]) -> None:
        import onnx_ir as ir

        self._graph = graph
        self._types = types
        self._roles = roles_of(graph)
        self._floats = {value for value in graph.initializers.values() if value.dtype == ir.DataType.FLOAT}
        self._cast: dict[tuple[ir.Value, ElementType], ir.Value] = {}
        self._kinds: dict[ir.Value, ElementType] = {
            value: "float32" for value in graph.inputs if value.dtype == ir.DataType.FLOAT
        }
        self._image: set[ir.Value | None] = set(graph.inputs)  # the image, and the image scaled or rearranged

    def run(self) -> None:
        for node in self._graph:
            self._cast_node(node)
        for result in self._graph.outputs:
            if self._kinds[result] != "float32":
                raise ExportError(f"output {result.name}: expected float32, got {self._kinds[result]}")

    def _cast_node(self, node: ir.Node) -> None:
        kind = self._kind(node)
        if kind is not None:
            for index, value in enumerate(node.inputs):
                if value is not None:
                    node.replace_input_with(index, self._as(value, kind, reader=node))
            if node.op_type != "QuantizeLinear":
                for output in node.outputs:
                    if output.dtype is None or output.dtype.is_floating_point():  # an ArgMax gives integers
                        output.type = _tensor_type(kind)
                        self._kinds[output] = kind
        if self._roles[node] in ("shape", "input") and self._image.intersection(node.inputs):
            self._image.update(node.outputs)

    def _kind(self, node: ir.Node) -> ElementType | None:
        """Return the data type that the node computes in, or None if its inputs are not cast."""
        role = self._roles[node]
        if role == "input" and node.op_type == "Cast":
            self._kinds[node.outputs[0]] = "float32"
            return None
        if role != "shape":
            return self._types[role]
        if node.op_type == "Shape":
            return None
        handed = [self._kinds[value] for value in node.inputs if value in self._kinds]
        if handed:
            return handed[0]
        # A shape node reads only one floating-point constant: the class token, which the node repeats for the batch.
        return self._types["residual"] if self._floats.intersection(node.inputs) else None

    def _as(self, value: ir.Value, kind: ElementType, *, reader: ir.Node) -> ir.Value:
        """Return a tensor in a data type.  A Cast between two nodes of an attention belongs to it."""
        if self._kinds.get(value, "float32" if value in self._floats else kind) == kind:
            return value
        if (value, kind) not in self._cast:
            make = self._constant if value in self._floats else self._computed
            self._cast[value, kind] = make(value, kind, reader)
        return self._cast[value, kind]

    def _computed(self, value: ir.Value, kind: ElementType, reader: ir.Node) -> ir.Value:
        import onnx_ir as ir

        out = ir.Value(name=f"{value.name}.{kind}", shape=value.shape, type=_tensor_type(kind))
        node = ir.node("Cast", [value], {"to": out.dtype}, name=f"{out.name}/Cast", outputs=[out])
        reader.prepend(node)
        attention, maker = declared_attention(reader), value.producer()
        inside = attention if maker is not None and attention == declared_attention(maker) else None
        declare(node, "input" if value in self._image else "shape", attention=inside)
        if value in self._image:
            self._image.add(out)
        self._kinds[out] = kind
        return out

    def _constant(self, value: ir.Value, kind: ElementType, reader: ir.Node) -> ir.Value:
        values = stored(value)
        with np.errstate(over="ignore"):
            rounded = values.astype(numpy_type(kind))
        held = rounded.astype(np.float32)
        # A constant may contain −∞, which excludes entries of the scores from the softmax. A finite value must remain
        # finite.
        if not (np.isfinite(held) | (np.isneginf(values) & np.isneginf(held))).all():
            largest = np.abs(values[~np.isneginf(values)]).max()
            raise ExportError(
                f"constant {value.name}: the largest value, {largest:.3g}, exceeds the range of {kind}",
                hint="type --precision bf16: bfloat16 has the range of float32",
            )
        return add_constant(self._graph, f"{value.name}.{kind}", rounded)


def _tensor_type(kind: ElementType) -> ir.TensorType:
    import onnx_ir as ir

    return ir.TensorType(ir.DataType.from_numpy(numpy_type(kind)))
