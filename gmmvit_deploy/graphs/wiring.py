"""Find the node that computes a tensor of an ONNX graph, the only node that reads it, and the constant tensors.

A graph has the form of onnx_ir: a value links to the node that computes it and to its uses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

if TYPE_CHECKING:
    import onnx_ir as ir


class Constants:
    """The constant tensors of a graph at the time when the object is created.

    sizes: constant tensor → the number of elements. A tensor that is computed only from constants, such as a
    dequantised weight, has the size of its largest input.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self.sizes: dict[ir.Value | None, int] = {}
        for value in graph.initializers.values():
            self.sizes[value] = 1 if value.const_value is None else value.const_value.size
        for node in graph:
            if node.op_type == "Constant":
                tensor = node.attributes.get_tensor("value")
                self.sizes[node.outputs[0]] = 1 if tensor is None else tensor.size
            read = [value for value in node.inputs if value is not None]
            if read and all(value in self.sizes for value in read):
                self.sizes.update(dict.fromkeys(node.outputs, max(self.sizes[value] for value in read)))

    def index(self, node: ir.Node) -> int | None:
        """Return the index of the node's first constant input, or None."""
        return next((index for index, value in enumerate(node.inputs) if value in self.sizes), None)

    def computed(self, node: ir.Node) -> list[ir.Value]:
        """Return the inputs of the node that are no constants."""
        return [value for value in node.inputs if value is not None and value not in self.sizes]

    def is_product(self, node: ir.Node) -> bool:
        """Return True if the node is a matrix product of two computed tensors."""
        return node.op_type == "MatMul" and self.index(node) is None

    def is_mixing(self, node: ir.Node) -> bool:
        """Return True if the node is a matrix product with a constant on the left, as in head mixing."""
        return node.op_type == "MatMul" and self.index(node) == 0


def input_of(node: ir.Node, index: int) -> ir.Value:
    """Return an input that the operator requires.  Errors: ValueError for a node without it."""
    value = node.inputs[index] if index < len(node.inputs) else None
    if value is None:
        raise ValueError(f"{node.name}: expected an input {index} of {node.op_type}")
    return value


def producer_of(value: ir.Value | None) -> ir.Node | None:
    """Return the node that computes an input of a node, or None if the input is absent or not computed."""
    return value.producer() if value is not None else None


def made_by(value: ir.Value | None, operator: str) -> ir.Node | None:
    """Return the node that computes a tensor if it has this operator, else None."""
    node = producer_of(value)
    return node if node is not None and node.op_type == operator else None


def only_reader(value: ir.Value, operator: str | None = None) -> ir.Node | None:
    """Return the only node that reads a tensor; None if another node reads it too, or it has another operator."""
    uses = list(value.uses())
    return uses[0].node if len(uses) == 1 and operator in (None, uses[0].node.op_type) else None


def values_of(value: ir.Value | None) -> NDArray[Any] | None:
    """Return the values of an initializer, or None for any other tensor."""
    if value is None or value.const_value is None or not value.is_initializer():
        return None
    values: NDArray[Any] = value.const_value.numpy()
    return values


def stored(value: ir.Value | None) -> NDArray[Any]:
    """Return the values of an initializer.  Errors: ValueError for any other tensor."""
    values = values_of(value)
    if values is None:
        raise ValueError(f"expected a constant, got {value}")
    return values


def add_constant(graph: ir.Graph, name: str, values: NDArray[Any]) -> ir.Value:
    """Store values as an initializer of the graph, in place of one with this name."""
    import onnx_ir as ir

    tensor = ir.tensor(values, name=name)
    constant = ir.Value(name=name, shape=ir.Shape(values.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.initializers[name] = constant
    return constant


def inner_shape(value: ir.Value) -> tuple[int, ...] | None:
    """Return the declared dimensions of a tensor without the batch, or None if a dimension is unknown."""
    inner = value.shape[1:] if value.shape is not None else ()
    sizes = tuple(size for size in inner if isinstance(size, int) and size > 0)
    return sizes if inner and len(sizes) == len(inner) else None


def order_of(transpose: ir.Node) -> list[int]:
    """Return the permutation of a Transpose; an empty list if the node does not state it."""
    return list(transpose.attributes.get_ints("perm", ()))


def remove_unused(model: ir.Model) -> None:
    """Remove the nodes and the constants that nothing reads."""
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    RemoveUnusedNodesPass()(model)


_CHANNELS_FIRST = [0, 3, 1, 2]


def end_of_normalisation(graph: ir.Graph) -> ir.Value | None:
    """Return the normalised tensor, or None if the graph does not begin with a normalisation.

    The normalisation is the path of nodes from the graph's input to the Transpose that moves the channels to the front.
    They read constants beside the tensor of the path, which no other node reads, apart from Shape nodes.
    """
    value = graph.inputs[0]
    while True:
        # A Shape node reads only the batch size, and is not a step of the normalisation.
        users = [node for node in value.consumers() if node.op_type != "Shape"]
        if len(users) != 1 or not all(other is value or other.is_initializer() for other in users[0].inputs if other):
            return None
        (node,) = users
        value = node.outputs[0]
        if node.op_type == "Transpose":
            return value if order_of(node) == _CHANNELS_FIRST else None
