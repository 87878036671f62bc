"""Implement `GraphView`, the matcher's interface to a graph, for ONNX graphs, and list the attentions of a graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gmmvit_deploy.graphs.wiring import Wiring
from gmmvit_deploy.runtimes.kernels.matcher import MatchedAttention, Refusal, attentions_in

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import GraphProto, ModelProto, NodeProto

__all__ = ["OnnxView", "attentions_of_kernel"]

_KINDS = {
    "MatMul": "matrix product",
    "Mul": "multiplication",
    "Add": "addition",
    "Reshape": "reshape",
    "Transpose": "transpose",
    "Softmax": "softmax",
    "Cast": "cast",
}


class OnnxView:
    """An ONNX graph as a `GraphView`.  A value is the name of a tensor."""

    def __init__(self, graph: GraphProto) -> None:
        self.wiring = Wiring(graph)
        self._softmaxes = [node.output[0] for node in graph.node if node.op_type == "Softmax"]

    def softmaxes(self) -> list[str]:
        return self._softmaxes

    def name(self, value: str) -> str:
        return self.wiring.maker[value].name

    def kind(self, value: str) -> str:
        node = self.wiring.maker.get(value)
        if node is None:
            return "constant" if value in self.wiring.initializers else "input"
        return _KINDS.get(node.op_type, node.op_type)

    def inputs(self, value: str) -> list[str]:
        return list(self.wiring.maker[value].input)

    def constant(self, value: str) -> NDArray[Any] | None:
        return self.wiring.array(value)

    def plain(self, value: str) -> str:
        return value

    def reader(self, value: str, *, through_casts: bool = False) -> str | None:
        node = self.wiring.only_reader(value)
        return node.output[0] if node is not None else None

    def readers(self, value: str) -> list[str]:
        return [self.kind(node.output[0]) for node in self.wiring.readers.get(value, [])]

    def shape(self, value: str) -> tuple[int, ...] | None:
        return self.wiring.inner_shape(value)

    def fixed_batch(self, value: str) -> int | None:
        return self.wiring.fixed_batch(value)

    def target(self, value: str) -> tuple[int, ...] | None:
        """Return the shape that the constant of a Reshape states, without the batch dimension.

        Returns None if the shape is not a constant, or if a size is left open.
        """
        inputs = self.wiring.maker[value].input
        constant = self.wiring.array(inputs[1]) if len(inputs) > 1 else None  # the shape: an attribute before opset 5
        inner = () if constant is None else tuple(int(size) for size in constant.reshape(-1)[1:])
        return inner if inner and min(inner) > 0 else None

    def order(self, value: str) -> list[int]:
        return next(
            (list(attribute.ints) for attribute in self.wiring.maker[value].attribute if attribute.name == "perm"), []
        )

    def axis(self, value: str) -> int:
        return _axis(self.wiring.maker[value], -1)

    def columns(self, value: str) -> tuple[str, int, int] | None:
        split = self.wiring.made_by(value, "Split")
        if split is None:
            return value, 0, 1
        source = split.input[0]
        shape = self.wiring.inner_shape(source)  # if the shape is None, the matcher refuses the attention later
        if len(split.input) > 1 or (shape is not None and _axis(split, 0) not in (len(shape), -1)):
            return None
        return source, list(split.output).index(value), len(split.output)

    def refused_type(self, value: str) -> str:
        from onnx import TensorProto

        kind = self.wiring.element_type(value)
        return "" if kind in (None, TensorProto.FLOAT) else TensorProto.DataType.Name(kind).lower()

    def takes_constant(self, array: NDArray[Any]) -> bool:
        return bool(array.dtype == "float32")


def _axis(node: NodeProto, default: int) -> int:
    return next((int(attribute.i) for attribute in node.attribute if attribute.name == "axis"), default)


def attentions_of_kernel(proto: ModelProto) -> list[MatchedAttention | Refusal]:
    """Return for each softmax of a graph either the attention that the kernel computes, or a refusal with a reason."""
    return attentions_in(OnnxView(proto.graph))
