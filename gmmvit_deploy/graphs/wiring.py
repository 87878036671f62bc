"""Find the node that outputs a tensor of an ONNX graph, the nodes that read it, and its properties; replace nodes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto


class Wiring:
    """The connections of a graph at the time when the object is created.  Later changes of the graph have no effect.

    maker: name of a tensor → the node that outputs it.
    readers: name of a tensor → the nodes that read it, twice if they read it twice.
    initializers: the constants that the graph stores, by name.
    sizes: name of a constant tensor → the number of elements. A tensor that is computed only from constants, such as a
    dequantised weight, has the size of its largest input.
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
        """Return the node that outputs the tensor ``name`` if it has this operator, else None."""
        node = self.maker.get(name)
        return node if node is not None and node.op_type == operator else None

    def only_reader(self, name: str, operator: str | None = None) -> NodeProto | None:
        """Return the only node that reads the tensor ``name``; None if there is another, or it has another operator."""
        readers = self.readers.get(name, [])
        return readers[0] if len(readers) == 1 and operator in (None, readers[0].op_type) else None

    def constant_input(self, node: NodeProto) -> int | None:
        """Return the index of the node's first constant input, or None."""
        return next((index for index, name in enumerate(node.input) if name in self.sizes), None)

    def computed_inputs(self, node: NodeProto) -> list[str]:
        return [name for name in node.input if name and name not in self.sizes]

    def array(self, name: str) -> NDArray[Any] | None:
        """Return the values of an initializer, or None for any other tensor."""
        return self.stored(name) if name in self.initializers else None

    def stored(self, name: str) -> NDArray[Any]:
        """Return the values of an initializer.  Errors: KeyError for any other tensor."""
        from onnx import numpy_helper

        values: NDArray[Any] = numpy_helper.to_array(self.initializers[name])
        return values

    def inner_shape(self, name: str) -> tuple[int, ...] | None:
        """Return the declared dimensions of a tensor without the batch, or None if a dimension is unknown."""
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
        """Return True if the node is a matrix product of two computed tensors."""
        return node.op_type == "MatMul" and self.constant_input(node) is None

    def is_mixing(self, node: NodeProto) -> bool:
        """Return True if the node is a matrix product with a constant on the left, as in head mixing."""
        return node.op_type == "MatMul" and self.constant_input(node) == 0


def attribute_of(node: NodeProto, name: str, default: Any) -> Any:
    """Return the value of a node's attribute, or ``default`` if the node does not state the attribute."""
    from onnx import helper

    return next((helper.get_attribute_value(stated) for stated in node.attribute if stated.name == name), default)


def order_of(transpose: NodeProto) -> list[int]:
    """Return the permutation of a Transpose; an empty list if the node does not state it."""
    return list(attribute_of(transpose, "perm", []))


def copy_of(proto: ModelProto) -> ModelProto:
    out = type(proto)()
    out.CopyFrom(proto)
    return out


def rewrite_graph(
    graph: GraphProto, nodes: Iterable[NodeProto], constants: Iterable[TensorProto], *, keep_shapes: bool = False
) -> None:
    """Replace a graph's nodes and constants.  Constants that no node reads, and that are no output, are left out.

    keep_shapes: True to keep the declared data types and shapes of the tensors that the new nodes compute. They are
    deleted by default, because they may be wrong for the new nodes.
    """
    # The arguments are copied first, because they may be the graph's own lists, which ``del`` empties.
    new_nodes = list(nodes)
    read = {name for node in new_nodes for name in node.input} | {value.name for value in graph.output}
    new_constants = [constant for constant in constants if constant.name in read]
    computed = {name for node in new_nodes for name in node.output} if keep_shapes else set()
    values = [value for value in graph.value_info if value.name in computed]
    del graph.node[:], graph.initializer[:], graph.value_info[:]
    graph.node.extend(new_nodes)
    graph.initializer.extend(new_constants)
    graph.value_info.extend(values)


_CHANNELS_FIRST = [0, 3, 1, 2]


def end_of_normalisation(graph: GraphProto) -> str | None:
    """Return the name of the normalised tensor, or None if the graph does not begin with a normalisation.

    The normalisation is the path of nodes from the graph's input to the Transpose that moves the channels to the front.
    They read constants beside the tensor of the path, which no other node reads, apart from Shape nodes.
    """
    constants = {constant.name for constant in graph.initializer}
    name: str = graph.input[0].name
    for _ in range(len(graph.node)):
        # A Shape node reads only the batch size, and is not a step of the normalisation.
        users = [node for node in graph.node if name in node.input and node.op_type != "Shape"]
        if len(users) != 1 or any(other not in constants for other in users[0].input if other != name):
            return None
        (node,) = users
        name = node.output[0]
        if node.op_type == "Transpose":
            return name if order_of(node) == _CHANNELS_FIRST else None
    return None
