"""Plant a mistake in a copy of an exported graph, by editing its nodes and constants.

A node is found by its operator and by the module that its name begins with. A constant can be the input of several
nodes, because the exporter stores equal constants once, so an edit gives a node a constant of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.specs import ModelSpec
from tests.conftest import MANIFEST
from tests.models.families.small_models import Small


@dataclass(frozen=True)
class Other(Small):
    """A small model that is no variant of its family: the model of ``other_spec``."""

    other_spec: ModelSpec | None = None

    @property
    def spec(self) -> ModelSpec:
        return self.other_spec


class GraphCopy:
    """A copy of a bundle's graph.

    model: the trained model of the bundle.  trained: name → array of the model's state, in float64.
    """

    def __init__(self, proto: onnx.ModelProto, model: Model) -> None:
        self._proto = proto
        self._constants = {constant.name: numpy_helper.to_array(constant) for constant in proto.graph.initializer}
        self._added: list[onnx.TensorProto] = []
        self.nodes = list(proto.graph.node)
        self.model = model
        self.trained = {name: tensor.double().numpy() for name, tensor in model.state_dict().items()}

    def proto(self) -> onnx.ModelProto:
        """Return the edited graph."""
        proto = onnx.ModelProto()
        proto.CopyFrom(self._proto)
        del proto.graph.node[:]
        proto.graph.node.extend(self.nodes)
        proto.graph.initializer.extend(self._added)
        del proto.graph.value_info[:]  # shapes before the edit
        return proto

    def find(self, operator: str, module: str = ".*") -> list[onnx.NodeProto]:
        """Return the nodes of an operator in the modules that match a regular expression; at least a single node."""
        nodes = [node for node in self.nodes if node.op_type == operator and re.fullmatch(module, self.module(node))]
        assert nodes, f"no {operator} in a module {module}"
        return nodes

    def only(self, operator: str, module: str) -> onnx.NodeProto:
        (node,) = self.find(operator, module)
        return node

    @staticmethod
    def module(node: onnx.NodeProto) -> str:
        """Return the module of a node: ``blocks.0.attention/MatMul.1`` is a node of ``blocks.0.attention``."""
        return node.name.rpartition("/")[0]

    def constant(self, node: onnx.NodeProto, index: int | None = None) -> np.ndarray:
        """Return a copy of a constant input of a node.  index: None if the node has a single constant input."""
        array = self._constants[node.input[self._place(node) if index is None else index]]
        return array.astype(np.float64) if array.dtype == np.float32 else array.copy()

    def _place(self, node: onnx.NodeProto) -> int:
        (place,) = (index for index, name in enumerate(node.input) if name in self._constants)
        return place

    def feed(self, node: onnx.NodeProto, array: np.ndarray, index: int | None = None) -> None:
        """Replace a constant input of a node.  index: None if the node has a single constant input."""
        node.input[self._place(node) if index is None else index] = self._named(array)

    def change(
        self, node: onnx.NodeProto, change: Callable[[np.ndarray], np.ndarray], index: int | None = None
    ) -> None:
        self.feed(node, change(self.constant(node, index)), index)

    def become(self, node: onnx.NodeProto, operator: str, *inputs: str | np.ndarray, **attributes: Any) -> None:
        """Replace a node by another operator with the same outputs.  inputs: by default those of the node."""
        names = [self._named(value) for value in inputs] or list(node.input)
        node.CopyFrom(helper.make_node(operator, names, list(node.output), name=node.name, **attributes))

    def insert(self, before: onnx.NodeProto, operator: str, *inputs: str | np.ndarray, **attributes: Any) -> str:
        """Insert a node before another node, and return the name of its output."""
        output = f"planted.{len(self.nodes)}"
        names = [self._named(value) for value in inputs]
        place = next(index for index, node in enumerate(self.nodes) if node is before)
        self.nodes.insert(place, helper.make_node(operator, names, [output], name=output, **attributes))
        return output

    @staticmethod
    def set_attribute(node: onnx.NodeProto, name: str, value: Any) -> None:
        kept = [attribute for attribute in node.attribute if attribute.name != name]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute(name, value)])

    def _named(self, value: str | np.ndarray) -> str:
        if isinstance(value, str):
            return value
        array = np.array(value, dtype=np.float32 if value.dtype.kind == "f" else np.int64, order="C")
        name = f"planted.constant.{len(self._added)}"
        self._added.append(numpy_helper.from_array(array, name))
        self._constants[name] = array
        return name


def changed(
    operator: str, module: str, change: Callable[[np.ndarray], np.ndarray], index: int | None = None
) -> Callable[[GraphCopy], None]:
    """Return a function that changes a constant of each node of an operator.  module, index: as in `GraphCopy`."""

    def plant(graph: GraphCopy) -> None:
        for node in graph.find(operator, module):
            graph.change(node, change, index)

    return plant


@dataclass(frozen=True)
class Planted:
    """A mistake in a copy of a graph.

    where: the small model or the name of the golden checkpoint whose graph is copied.
    plant: a function that edits the copy.  name: the name under which ``gmmvit parity`` reports the mistake.
    """

    where: Small | str
    plant: Callable[[GraphCopy], None]
    name: str

    def __str__(self) -> str:
        return f"{self.where}-{self.name}"

    @property
    def family(self) -> str:
        return str(MANIFEST[self.where]["family"]) if isinstance(self.where, str) else self.where.family.name
