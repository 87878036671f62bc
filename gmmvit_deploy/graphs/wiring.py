"""Who makes and who reads each tensor of an ONNX graph, which tensors are constants, and their shapes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import GraphProto, NodeProto, TensorProto, ValueInfoProto

__all__ = ["Wiring"]


class Wiring:
    """The connections of a graph as they were when it was made; a later change of the graph is not seen.

    maker: tensor → the node that gives it.  readers: tensor → the nodes that read it, once for each input.
    initializers: tensor → its constant, as stored.
    sizes: every constant tensor → an upper bound of its number of elements: initializers, outputs of Constant nodes,
    and whatever is computed from constants alone (a dequantised weight, say).
    """

    def __init__(self, graph: GraphProto) -> None:
        self.maker: dict[str, NodeProto] = {name: node for node in graph.node for name in node.output}
        self.readers: dict[str, list[NodeProto]] = {}
        for node in graph.node:
            for name in node.input:
                self.readers.setdefault(name, []).append(node)
        self.initializers: dict[str, TensorProto] = {tensor.name: tensor for tensor in graph.initializer}
        self.sizes: dict[str, int] = {tensor.name: math.prod(tensor.dims) for tensor in graph.initializer}
        for node in graph.node:
            if node.op_type == "Constant":
                self.sizes[node.output[0]] = max(
                    (math.prod(one.t.dims) for one in node.attribute if one.name == "value"), default=1
                )
        for node in graph.node:
            if node.input and all(name in self.sizes or not name for name in node.input):
                self.sizes.update(dict.fromkeys(node.output, max(self.sizes[name] for name in node.input if name)))
        self._types: dict[str, ValueInfoProto] = {value.name: value for value in graph.value_info}

    def made_by(self, name: str, operator: str) -> NodeProto | None:
        """The node that gives this tensor, if it is such an operator."""
        node = self.maker.get(name)
        return node if node is not None and node.op_type == operator else None

    def only_reader(self, name: str, operator: str | None = None) -> NodeProto | None:
        """The single reader of this tensor (if it is such an operator); None if there are more or none."""
        readers = self.readers.get(name, [])
        return readers[0] if len(readers) == 1 and operator in (None, readers[0].op_type) else None

    def constant_input(self, node: NodeProto) -> int | None:
        """Index of the first input that is a constant, or None."""
        return next((index for index, name in enumerate(node.input) if name in self.sizes), None)

    def computed_inputs(self, node: NodeProto) -> list[str]:
        return [name for name in node.input if name and name not in self.sizes]

    def array(self, name: str) -> NDArray[Any] | None:
        """The values of an initializer; None for any other tensor."""
        from onnx import numpy_helper

        tensor = self.initializers.get(name)
        return None if tensor is None else numpy_helper.to_array(tensor)

    def inner_shape(self, name: str) -> tuple[int, ...] | None:
        """All dimensions but the batch, as the graph declares them; None where they are not all known."""
        value = self._types.get(name)
        if value is None:
            return None
        shape = [dim.dim_value if dim.HasField("dim_value") else -1 for dim in value.type.tensor_type.shape.dim]
        return tuple(shape[1:]) if len(shape) > 1 and min(shape[1:]) > 0 else None

    def element_type(self, name: str) -> int | None:
        """``TensorProto.DataType`` of a tensor, as the graph declares it."""
        value = self._types.get(name)
        return value.type.tensor_type.elem_type if value is not None else None

    def is_product(self, node: NodeProto) -> bool:
        """A matrix product of two computed tensors."""
        return node.op_type == "MatMul" and self.constant_input(node) is None

    def is_mixing(self, node: NodeProto) -> bool:
        """A product with a constant on its left: it mixes heads."""
        return node.op_type == "MatMul" and self.constant_input(node) == 0
