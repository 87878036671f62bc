"""Measure how a precision changes each mask, check that the graph stores the masks as constants, and leave masks out.

The masks cost the difference between the time of a graph and the time of its twin (`with_masks_of_one`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from gmmvit_deploy.errors import ExportError
from gmmvit_deploy.files.writing import sha256_of_bytes
from gmmvit_deploy.graphs.cast import numpy_type
from gmmvit_deploy.graphs.constants import ConstantRecord, LayerConstant, MaskChange, array_of
from gmmvit_deploy.graphs.folded import require_folded
from gmmvit_deploy.graphs.roles import attentions_of
from gmmvit_deploy.graphs.wiring import add_constant, remove_unused, values_of
from gmmvit_deploy.inference.precision import element_type

if TYPE_CHECKING:
    import onnx_ir as ir

    from gmmvit_deploy.inference.precision import Precision


def changes_of(masks: Sequence[LayerConstant], precision: Precision) -> Iterator[MaskChange]:
    """Measure, for each head of each layer, how the cast to this precision changes the float32 mask."""
    import ml_dtypes

    kind = numpy_type(element_type("mask", precision))
    smallest = float(ml_dtypes.finfo(kind).smallest_normal)  # type: ignore[no-untyped-call]
    for mask in masks:
        constant = array_of(mask.constant)
        for head, exact in enumerate(constant.reshape(-1, *constant.shape[-2:])):
            with np.errstate(over="ignore"):
                rounded = exact.astype(kind).astype(np.float64)
            change = np.abs(rounded - exact)
            flushed = (rounded == 0) & (exact != 0)
            kept = (exact != 0) & ~flushed & np.isfinite(rounded)
            yield MaskChange(
                layer=mask.layer,
                head=head,
                entries=exact.size,
                largest_change=float(change[np.isfinite(change)].max(initial=0.0)),
                relative_change=float((change[kept] / np.abs(exact[kept].astype(np.float64))).max(initial=0.0)),
                flushed=int(flushed.sum()),
                subnormal=int((kept & (np.abs(exact) < smallest)).sum()),
                saturated=int((~np.isfinite(rounded)).sum()),
            )


def prove_masks(
    graph: ir.Graph, masks: Sequence[LayerConstant], records: Sequence[ConstantRecord], precision: Precision
) -> tuple[dict[str, str], dict[str, str]]:
    """Check that a graph cast to ``precision`` stores each mask as a constant, equal to the cast mask bit for bit.

    records: the record of each mask, from the float32 graph before the cast.
    Returns (layer → name of the layer's mask in the graph, layer → SHA-256 of the bytes of this mask).
    Errors: ExportError when a mask is absent or another, and as in `require_folded`.
    """
    require_folded(graph)
    kind = element_type("mask", precision)
    names, hashes = {}, {}
    for mask, record in zip(masks, records, strict=True):
        name = record.constant if kind == "float32" else f"{record.constant}.{kind}"
        expected = array_of(mask.constant).astype(numpy_type(kind))
        found = values_of(graph.initializers.get(name))
        if found is None or found.tobytes() != expected.tobytes():
            raise ExportError(f"{mask.layer}: the graph does not contain the folded mask of this layer in {kind}")
        names[mask.layer], hashes[mask.layer] = name, sha256_of_bytes(expected.tobytes())
    return names, hashes


def with_masks_of_one(model: ir.Model) -> ir.Model:
    """Return a graph with an arbitrary scalar in place of every mask, to measure sizes and times: logits mean nothing.

    A model without masks multiplies the scores by a scalar too, 1/√d for the head dim d.
    """
    import onnx_ir as ir

    out = model.clone()
    graph = out.graph
    values = ir.convenience.create_value_mapping(graph)
    for name in {attention.mask for attention in attentions_of(graph) if attention.mask}:
        kind = (values[name].dtype or ir.DataType.FLOAT).numpy()
        values[name].replace_all_uses_with(add_constant(graph, f"{name}.one", np.asarray(0.25, kind)))
    remove_unused(out)
    return out
