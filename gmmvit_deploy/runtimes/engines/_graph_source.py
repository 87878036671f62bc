"""Read the ONNX graph before an engine is built: the graph's input, its attentions, and the roles of its nodes.

A role says what a node is for. The precision policy assigns a data type to each role (`graphs.roles`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from gmmvit_deploy.errors import ExportError, InputError
from gmmvit_deploy.graphs.declared import Attention
from gmmvit_deploy.graphs.folded import require_folded
from gmmvit_deploy.graphs.roles import attentions_of, roles_of, unknown_operators
from gmmvit_deploy.graphs.wiring import inner_shape, input_of
from gmmvit_deploy.inference.precision import Role

if TYPE_CHECKING:
    import onnx_ir as ir


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
    model: ir.Model
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
    import onnx_ir as ir

    try:
        model = ir.load(path)
    except FileNotFoundError as exc:
        raise InputError(f"{path}: no such file") from exc
    except Exception as exc:  # protobuf's exception classes differ between its versions
        first = str(exc).strip().splitlines()[:1]
        raise InputError(f"{path}: not an ONNX model: {first[0] if first else exc}") from exc
    if not len(model.graph):
        raise InputError(f"{path}: not an ONNX model: it has no nodes")
    for name, value in model.graph.initializers.items():
        weights = value.const_value
        if isinstance(weights, ir.ExternalTensor) and not Path(weights.path).is_file():
            raise InputError(f"{path}: the tensor {name!r} is in the file {weights.path}, which does not exist")
    for number, node in enumerate(model.graph):
        node.name = node.name or f"{node.op_type}_{number}"  # messages name nodes; ONNX requires no names
    tensor, shape, dtype = _input(path, model.graph)
    attentions = attentions_of(model.graph)
    unknown = unknown_operators(model.graph)
    unjudged = ""
    if unknown:
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        verb = "has" if len(unknown) == 1 else "have"
        unjudged = f"{', '.join(unknown[:3])}{more} {verb} no role in the precision policy"
    try:
        require_folded(model.graph)
        unfolded: tuple[str, ...] = ()
    except ExportError as exc:
        unfolded = (str(exc),)
    return GraphSource(
        path=path,
        model=model,
        tensor=tensor,
        shape=shape,
        dtype=dtype,
        attentions=attentions,
        head_dims=_head_dims(model, attentions),
        roles={} if unknown else {str(node.name): role for node, role in roles_of(model.graph).items()},
        unjudged=unjudged,
        unfolded=unfolded,
    )


def _input(path: Path, graph: ir.Graph) -> tuple[str, tuple[int, ...], str]:
    inputs = [value for value in graph.inputs if not value.is_initializer()]
    if len(inputs) != 1:
        raise InputError(f"{path}: expected a single input, the images, got {len(inputs)} inputs")
    (image,) = inputs
    shape, inner = image.shape, inner_shape(image)
    if image.dtype is None or shape is None or inner is None or shape.is_static(0):
        raise InputError(f"{path}: expected an input with a dynamic batch and fixed other dimensions, got {shape}")
    return str(image.name), inner, str(image.dtype.numpy())


def _head_dims(model: ir.Model, attentions: tuple[Attention, ...]) -> dict[str, int]:
    """Map each attention to the head dim, the last dimension of Q, where it can be inferred."""
    from onnx_ir.passes.common import ShapeInferencePass

    # Some converters write inconsistent shapes, of which the pass warns. Only messages use the inferred shapes.
    logging.getLogger("onnx_ir").setLevel(logging.ERROR)
    ShapeInferencePass(strict_mode=False)(model)
    queries = {attention.name: input_of(model.graph.node(attention.nodes[0]), 0).shape for attention in attentions}
    return {name: shape[-1] for name, shape in queries.items() if shape and isinstance(shape[-1], int)}
