"""Keep the weights of a graph outside of its protobuf: a protobuf has at most 2 GiB, and each copy copies the weights.

model.onnx         the graph; each large constant names its place in the other file
model.onnx.data    the values of these constants, if the weights have `EXTERNAL_FROM_BYTES` or more
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnx import ModelProto, TensorProto

EXTERNAL_FROM_BYTES = 1_500_000_000
_LARGE_BYTES = 65_536
"""Constants up to this size stay in the graph, where its passes read them: shapes, indices and scales."""
_ALIGNMENT = 4096  # a runtime can then map the file into memory


def data_path(path: Path) -> Path:
    """Return the file beside a graph for its weights, if the graph does not hold them."""
    return path.with_name(f"{path.name}.data")


def files_of(path: Path) -> tuple[Path, ...]:
    return (path, data_path(path)) if data_path(path).is_file() else (path,)


def has_external_weights(proto: ModelProto) -> bool:
    """Return True if `write_graph` writes the weights of this graph to a file of their own."""
    return sum(map(_size_bytes, proto.graph.initializer)) >= EXTERNAL_FROM_BYTES


def write_graph(proto: ModelProto, path: Path) -> None:
    """Write a graph to ``path``, and large weights to `data_path`.

    The file states the lowest IR version that has the graph's opset, so that runtimes of that opset read it.
    Errors: OSError when writing fails.
    """
    if not has_external_weights(proto):
        _write_parts(proto, path)
        return
    light = without_weights(proto)
    with data_path(path).open("wb") as file:
        for reference, tensor in zip(light.graph.initializer, proto.graph.initializer, strict=True):
            if reference.data_location == reference.EXTERNAL:
                file.seek(-(-file.tell() // _ALIGNMENT) * _ALIGNMENT)
                place = {"location": data_path(path).name, "offset": file.tell(), "length": _size_bytes(tensor)}
                file.write(tensor.raw_data)
                del reference.external_data[:]
                for key, value in place.items():
                    reference.external_data.add(key=key, value=str(value))
    light.ir_version = _lowest_ir_version(proto)
    path.write_bytes(light.SerializeToString(deterministic=True))


def _lowest_ir_version(proto: ModelProto) -> int:
    from onnx import helper

    return helper.find_min_ir_version_for(list(proto.opset_import), ignore_unknown=True)


def _write_parts(proto: ModelProto, path: Path) -> None:
    """Write a graph, then each constant: protobuf needs several times the memory of what it serialises.

    A reader joins the parts, because a protobuf that follows another one in a file adds to its lists.
    """
    nodes = type(proto)()
    _copy_fields(proto, nodes, leave_out="graph")
    nodes.ir_version = _lowest_ir_version(proto)
    _copy_fields(proto.graph, nodes.graph, leave_out="initializer")
    with path.open("wb") as file:
        file.write(nodes.SerializeToString(deterministic=True))
        for tensor in proto.graph.initializer:
            part = type(proto)()
            part.graph.initializer.append(tensor)
            file.write(part.SerializeToString(deterministic=True))


def without_weights(proto: ModelProto) -> ModelProto:
    """Return a copy whose large constants have a type and a shape, and no values."""
    light = type(proto)()
    _copy_fields(proto, light, leave_out="graph")
    _copy_fields(proto.graph, light.graph, leave_out="initializer")
    for tensor in proto.graph.initializer:
        copy = light.graph.initializer.add()
        if not is_large(_size_bytes(tensor)) or not tensor.HasField("raw_data"):
            copy.CopyFrom(tensor)
            continue
        copy.name, copy.data_type, copy.data_location = tensor.name, tensor.data_type, tensor.EXTERNAL
        copy.dims.extend(tensor.dims)
        copy.external_data.add(key="location", value="weights")
    return light


def is_large(byte_count: int) -> bool:
    """Return True if a constant of this size may lie outside of the graph."""
    return byte_count > _LARGE_BYTES


def _size_bytes(tensor: TensorProto) -> int:
    from onnx import helper

    itemsize: int = helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    return itemsize * int(math.prod(tensor.dims))


def _copy_fields(source: Any, target: Any, *, leave_out: str) -> None:
    for field, value in source.ListFields():
        if field.name == leave_out:
            continue
        if hasattr(value, "extend"):
            getattr(target, field.name).extend(value)
        elif hasattr(value, "CopyFrom"):
            getattr(target, field.name).CopyFrom(value)
        else:
            setattr(target, field.name, value)
