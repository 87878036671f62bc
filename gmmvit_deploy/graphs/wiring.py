"""The nodes that make and read each tensor of an ONNX graph, its constant tensors, and the shapes of its tensors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import GraphProto, NodeProto, TensorProto, ValueInfoProto

__all__ = ["Wiring"]


class Wiring:
    """The connections of a graph at the time of the call; later changes of the graph have no effect.

    maker: tensor → the node that outputs it.  readers: tensor → the nodes that read it, once for each input.
    initializers: tensor → its stored constant.
    sizes: constant tensor → an upper bound of its number of elements. Constant tensors are initializers, outputs of
    Constant nodes, and tensors computed from constants alone, such as a dequantised weight.
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
                    (math.prod(attribute.t.dims) for attribute in node.attribute if attribute.name == "value"),
                    default=1,
                )
        for node in graph.node:
            if node.input and all(name in self.sizes or not name for name in node.input):
                self.sizes.update(dict.fromkeys(node.output, max(self.sizes[name] for name in node.input if name)))
        self._types: dict[str, ValueInfoProto] = {value.name: value for value in graph.value_info}

    def made_by(self, name: str, operator: str) -> NodeProto | None:
        """Return the node that outputs this tensor if it is such an operator, else None."""
        node = self.maker.get(name)
        return node if node is not None and node.op_type == operator else None

    def only_reader(self, name: str, operator: str | None = None) -> NodeProto | None:
        """Return the node that reads this tensor; None if the tensor does not have exactly one reader.

        operator: also return None if the node is another operator; None accepts every operator.
        """
        readers = self.readers.get(name, [])
        return readers[0] if len(readers) == 1 and operator in (None, readers[0].op_type) else None

    def constant_input(self, node: NodeProto) -> int | None:
        """Return the index of the first constant input, or None."""
        return next((index for index, name in enumerate(node.input) if name in self.sizes), None)

    def computed_inputs(self, node: NodeProto) -> list[str]:
        return [name for name in node.input if name and name not in self.sizes]

    def array(self, name: str) -> NDArray[Any] | None:
        """Return the values of an initializer; None for any other tensor."""
        from onnx import numpy_helper

        tensor = self.initializers.get(name)
        return None if tensor is None else numpy_helper.to_array(tensor)

    def inner_shape(self, name: str) -> tuple[int, ...] | None:
        """Return all dimensions but the batch, as the graph declares them; None if a dimension is unknown."""
        value = self._types.get(name)
        if value is None:
            return None
        shape = [dim.dim_value if dim.HasField("dim_value") else -1 for dim in value.type.tensor_type.shape.dim]
        return tuple(shape[1:]) if len(shape) > 1 and min(shape[1:]) > 0 else None

    def element_type(self, name: str) -> int | None:
        """Return the ``TensorProto.DataType`` that the graph declares for a tensor, or None."""
        value = self._types.get(name)
        return value.type.tensor_type.elem_type if value is not None else None

    def is_product(self, node: NodeProto) -> bool:
        """Return whether the node is a matrix product of two computed tensors."""
        return node.op_type == "MatMul" and self.constant_input(node) is None

    def is_mixing(self, node: NodeProto) -> bool:
        """Return whether the node is a product with a constant on the left, which mixes heads."""
        return node.op_type == "MatMul" and self.constant_input(node) == 0
