"""Write a graph, with its weights in a file of their own if they are large: a protobuf has at most 2 GiB.

model.onnx         the graph; each large constant names its place in the other file
model.onnx.data    the values of these constants, if the weights have `EXTERNAL_FROM_BYTES` or more
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir

EXTERNAL_FROM_BYTES = 1_500_000_000
_LARGE_BYTES = 65_536
"""Constants up to this size stay in the graph: shapes, indices and scales."""
_ALIGNMENT = 4096  # a runtime can then map the file into memory


def data_path(path: Path) -> Path:
    """Return the file beside a graph for its weights, if the graph does not hold them."""
    return path.with_name(f"{path.name}.data")


def files_of(path: Path) -> tuple[Path, ...]:
    return (path, data_path(path)) if data_path(path).is_file() else (path,)


def has_external_weights(model: ir.Model) -> bool:
    """Return True if `write_graph` writes the weights of this graph to a file of their own."""
    weights = [value.const_value for value in model.graph.initializers.values()]
    return sum(weight.nbytes for weight in weights if weight is not None) >= EXTERNAL_FROM_BYTES


def write_graph(model: ir.Model, path: Path) -> None:
    """Write a graph to ``path``, and large weights to `data_path`.

    The file states the lowest IR version that has the graph's opset, so that runtimes of that opset read it.
    Errors: OSError when writing fails.
    """
    import onnx_ir as ir
    from onnx import ModelProto
    from onnx.helper import find_min_ir_version_for, make_operatorsetid

    opsets = [make_operatorsetid(*opset) for opset in model.opset_imports.items()]
    model.ir_version = find_min_ir_version_for(opsets, ignore_unknown=True)
    if has_external_weights(model):
        name = data_path(path).name
        ir.save(model, path, external_data=name, size_threshold_bytes=_LARGE_BYTES, alignment=_ALIGNMENT)
        return
    # A protobuf needs several times the memory of what it serialises, so each constant is written by itself. A reader
    # joins the parts, because a protobuf that follows another one in a file adds to its lists.
    nodes = model.clone()
    nodes.graph.initializers.clear()
    with path.open("wb") as file:
        file.write(ir.to_proto(nodes).SerializeToString())
        for name, value in model.graph.initializers.items():
            part, tensor = ModelProto(), value.const_value
            if tensor is not None:
                ir.serde.serialize_tensor_into(part.graph.initializer.add(), tensor)
                part.graph.initializer[0].name = name  # that of the tensor can be another
            file.write(part.SerializeToString())
