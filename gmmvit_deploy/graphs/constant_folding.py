"""Compute the nodes of a graph whose inputs are all constants, with the optimiser of onnxscript.

The exporter folds only small constants. Networks of other packages compute position tables, relative indices and
rotations from larger constants in every forward pass; after this step the graph holds the results. The optimiser does
not compute nodes with several outputs; `constant_moves` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gmmvit_deploy.graphs.constant_moves import fold_constant_moves

if TYPE_CHECKING:
    from onnx import ModelProto

__all__ = ["without_constant_nodes"]

_MAX_ELEMENTS = 2**28  # 1 GiB of float32


def without_constant_nodes(proto: ModelProto) -> ModelProto:
    """Return the graph with every computable constant stored as an initializer.  Names and metadata of nodes stay."""
    import onnx_ir as ir
    from onnxscript import optimizer

    while True:
        model = ir.from_proto(proto)
        optimizer.fold_constants(
            model, onnx_shape_inference=False, input_size_limit=_MAX_ELEMENTS, output_size_limit=_MAX_ELEMENTS
        )
        optimizer.remove_unused_nodes(model)
        folded = ir.to_proto(model)
        proto = fold_constant_moves(folded)
        if proto is folded:
            return proto
