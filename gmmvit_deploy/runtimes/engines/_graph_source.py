"""Read the ONNX graph before an engine is built: the graph's input, its attentions, and the roles of its nodes.

A role says what a node is for. The precision policy assigns a data type to each role (`graphs.roles`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from gmmvit_deploy.errors import ExportError, InputError
from gmmvit_deploy.graphs.declared import Attention
from gmmvit_deploy.graphs.folded import require_folded
from gmmvit_deploy.graphs.roles import attentions_of, roles_of, unknown_operators
from gmmvit_deploy.graphs.weights import without_weights
from gmmvit_deploy.inference.precision import Role

if TYPE_CHECKING:
    from onnx import ModelProto


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GraphSource:
    """A graph to build an engine from.

    tensor, shape, dtype: of the graph's input; the shape is without the batch.
    head_dims: attention → head dim, where it can be inferred.  roles: node → role; empty if a node has no role.
    unjudged, unfolded, masks: as in `EngineCard`.  hashes: its ``sha256`` but for the plan.
    max_batch: of the bundle that contains the graph; None without a bundle.
    not_quantized: the projections that an int8 graph leaves unquantised on purpose, as its record says.
    """

    path: Path
    proto: ModelProto
    tensor: str
    shape: tuple[int, ...]
    dtype: str
    attentions: tuple[Attention, ...]
    head_dims: Mapping[str, int]
    roles: Mapping[str, Role]
    unjudged: str
    unfolded: tuple[str, ...]
    max_batch: int | None = None
    hashes: Mapping[str, str] = field(default_factory=dict)
    masks: Mapping[str, str] = field(default_factory=dict)
    not_quantized: frozenset[str] = frozenset()


def source_from_onnx(path: Path) -> GraphSource:
    """Read and check an ONNX file.

    Errors: InputError when the file is missing, is not an ONNX model, or has not exactly one input, with a dynamic
    batch and fixed other dimensions.
    """
    import onnx

    try:
        proto = onnx.load(path)
    except FileNotFoundError as exc:
        raise InputError(f"{path}: no such file") from exc
    except Exception as exc:  # protobuf's exception classes differ between its versions
        first = str(exc).strip().splitlines()[:1]
        raise InputError(f"{path}: not an ONNX model: {first[0] if first else exc}") from exc
    if not proto.graph.node:
        raise InputError(f"{path}: not an ONNX model: it has no nodes")
    for number, node in enumerate(proto.graph.node):
        node.name = node.name or f"{node.op_type}_{number}"  # roles are found by names, which ONNX does not require
    tensor, shape, dtype = _input(path, proto)
    attentions = attentions_of(proto.graph)
    unknown = unknown_operators(proto.graph)
    unjudged = ""
    if unknown:
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        verb = "has" if len(unknown) == 1 else "have"
        unjudged = f"{', '.join(unknown[:3])}{more} {verb} no role in the precision policy"
    try:
        require_folded(proto)
        unfolded: tuple[str, ...] = ()
    except ExportError as exc:
        unfolded = (str(exc),)
    return GraphSource(
        path=path,
        proto=proto,
        tensor=tensor,
        shape=shape,
        dtype=dtype,
        attentions=attentions,
        head_dims=_head_dims(proto, attentions),
        roles={} if unknown else roles_of(proto.graph),
        unjudged=unjudged,
        unfolded=unfolded,
    )


def _input(path: Path, proto: ModelProto) -> tuple[str, tuple[int, ...], str]:
    from onnx import helper

    constants = {tensor.name for tensor in proto.graph.initializer}
    inputs = [value for value in proto.graph.input if value.name not in constants]
    if len(inputs) != 1:
        raise InputError(f"{path}: expected a single input, the images, got {len(inputs)} inputs")
    kind = inputs[0].type.tensor_type
    dims = [dim.dim_value for dim in kind.shape.dim]
    if len(dims) < 2 or dims[0] or not all(dims[1:]):
        raise InputError(
            f"{path}: expected an input with a dynamic batch and fixed other dimensions, got {dims} (0 is dynamic)"
        )
    return inputs[0].name, tuple(dims[1:]), str(helper.tensor_dtype_to_np_dtype(kind.elem_type))


def _head_dims(proto: ModelProto, attentions: tuple[Attention, ...]) -> dict[str, int]:
    """Map each attention to the head dim, the last dimension of Q, where it can be inferred."""
    from onnx import shape_inference

    try:
        inferred = shape_inference.infer_shapes(without_weights(proto), data_prop=True).graph
    except shape_inference.InferenceError:
        return {}  # Some converters write inconsistent shapes. Only messages use the inferred shapes.
    shapes = {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in inferred.value_info}
    first = {node.name: node.input[0] for node in inferred.node}
    dims = {attention.name: shapes.get(first[attention.nodes[0]], [0])[-1:] for attention in attentions}
    return {name: dim[0] for name, dim in dims.items() if dim and dim[0]}
