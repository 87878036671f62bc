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
from gmmvit_deploy.graphs.wiring import copy_of, rewrite_graph
from gmmvit_deploy.inference.precision import ROLES, ElementType, Precision, element_type

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, TensorProto

_FIRST_BF16_OPSET = 22


def numpy_type(kind: ElementType) -> Any:
    """Return the numpy or ml_dtypes type for the name of a data type."""
    import ml_dtypes

    return {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[kind]


def cast_graph(proto: ModelProto, precision: Precision) -> ModelProto:
    """Return a new graph in this precision, whose inputs and outputs have the same data types as before.

    Errors: ExportError when a declared role is not in the policy, when a finite constant overflows in its new type, or
    when an output would not be float32.
    """
    return _Cast(proto, {role: element_type(role, precision) for role in ROLES if role != "shape"}).run()


class _Cast:
    def __init__(self, proto: ModelProto, types: Mapping[str, ElementType]) -> None:
        from onnx import TensorProto

        self._onnx_types = {
            "float32": TensorProto.FLOAT,
            "float16": TensorProto.FLOAT16,
            "bfloat16": TensorProto.BFLOAT16,
        }
        self._proto = proto
        self._types = types
        self._roles = roles_of(proto.graph)
        self._floats = {
            constant.name: constant for constant in proto.graph.initializer if constant.data_type == TensorProto.FLOAT
        }
        self._constants: dict[str, TensorProto] = {}
        self._kinds: dict[str, ElementType] = {
            value.name: "float32"
            for value in proto.graph.input
            if value.type.tensor_type.elem_type == TensorProto.FLOAT
        }
        self._nodes: list[NodeProto] = []
        self._image = {value.name for value in proto.graph.input}  # the image, and the image scaled or rearranged
        self._attentions = {name: declared_attention(node) for node in proto.graph.node for name in node.output}

    def run(self) -> ModelProto:
        out = copy_of(self._proto)
        for node in out.graph.node:
            self._add(node)
        for result in out.graph.output:
            if self._kinds[result.name] != "float32":
                raise ExportError(f"output {result.name}: expected float32, got {self._kinds[result.name]}")
        others = [constant for constant in out.graph.initializer if constant.name not in self._floats]
        rewrite_graph(out.graph, self._nodes, [*others, *self._constants.values()])
        if "bfloat16" in self._types.values():
            # Opset 22 is the first with bfloat16 convolutions. Opsets 21 and 22 change no other operator of the graphs.
            out.opset_import[0].version = max(_FIRST_BF16_OPSET, out.opset_import[0].version)
        return out

    def _add(self, node: NodeProto) -> None:
        kind = self._kind(node)
        if kind is not None:
            inputs = [self._as(name, kind, reader=node) for name in node.input]
            del node.input[:]
            node.input.extend(inputs)
            if node.op_type != "QuantizeLinear":
                self._kinds.update(dict.fromkeys(node.output, kind))
        self._nodes.append(node)
        if self._roles[node.name] in ("shape", "input") and self._image.intersection(node.input):
            self._image.update(node.output)

    def _kind(self, node: NodeProto) -> ElementType | None:
        """Return the data type that the node computes in, or None if its inputs are not cast."""
        role = self._roles[node.name]
        if role == "input" and node.op_type == "Cast":
            self._kinds[node.output[0]] = "float32"
            return None
        if role != "shape":
            return self._types[role]
        if node.op_type == "Shape":
            return None
        handed = [self._kinds[name] for name in node.input if name in self._kinds]
        if handed:
            return handed[0]
        # A shape node reads only one floating-point constant: the class token, which the node repeats for the batch.
        return self._types["residual"] if any(name in self._floats for name in node.input) else None

    def _as(self, name: str, kind: ElementType, *, reader: NodeProto) -> str:
        """Return the name of the tensor in a data type.  A Cast between two nodes of an attention belongs to it."""
        if name in self._floats:
            return self._constant(name, kind)
        if self._kinds.get(name, kind) == kind:
            return name
        cast = f"{name}.{kind}"
        if cast not in self._kinds:
            from onnx import helper

            node = helper.make_node("Cast", [name], [cast], name=f"{cast}/Cast", to=self._onnx_types[kind])
            attention = declared_attention(reader)
            inside = attention if attention == self._attentions.get(name) else None
            self._nodes.append(declare(node, "input" if name in self._image else "shape", attention=inside))
            if name in self._image:
                self._image.add(cast)
            self._kinds[cast] = kind
        return cast

    def _constant(self, name: str, kind: ElementType) -> str:
        from onnx import numpy_helper

        cast = name if kind == "float32" else f"{name}.{kind}"
        if cast not in self._constants:
            values = numpy_helper.to_array(self._floats[name])
            with np.errstate(over="ignore"):
                rounded = values.astype(numpy_type(kind))
            held = rounded.astype(np.float32)
            # A constant may contain −∞, which excludes entries of the scores from the softmax. A finite value must
            # remain finite.
            if not (np.isfinite(held) | (np.isneginf(values) & np.isneginf(held))).all():
                largest = np.abs(values[~np.isneginf(values)]).max()
                raise ExportError(
                    f"constant {name}: the largest value, {largest:.3g}, exceeds the range of {kind}",
                    hint="type --precision bf16: bfloat16 has the range of float32",
                )
            self._constants[cast] = numpy_helper.from_array(rounded, cast)
        return cast
