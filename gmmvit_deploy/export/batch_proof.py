"""Check that the batch of an exported graph is dynamic: in the graph's types, and by running the graph.

The exporter traces a model with two images. Some models, for example a model with a loop over the images of the batch,
export without an error to a graph whose batch is fixed at 2, or which computes the right logits only for two images.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from gmmvit_deploy.errors import ExportError, GmmvitError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import ModelProto, ValueInfoProto

__all__ = ["require_batches", "require_dynamic_batch"]

_HINT = (
    "in the code of the model, compute the images of a batch together, without a loop over the images, and write "
    "x.shape[0] in place of len(x)"
)


def require_dynamic_batch(proto: ModelProto) -> None:
    """Check that the first dimension of each input and output of the graph has a name and no fixed size.

    Errors: ExportError that names an input or output with a fixed batch, or whose batches have different names.
    """
    values = [*_inputs(proto), *proto.graph.output]
    fixed = [value.name for value in values if not _batch(value)]
    if fixed:
        raise ExportError(
            f"the exported graph has a fixed batch: expected a dynamic first dimension of {fixed[0]}, got "
            f"{_shape(next(value for value in values if value.name == fixed[0]))}",
            hint=_HINT,
        )
    if len({_batch(value) for value in values}) > 1:
        shapes = ", ".join(f"{value.name} {_shape(value)}" for value in values)
        raise ExportError(
            f"expected the same batch in the inputs and outputs of the exported graph, got {shapes}", hint=_HINT
        )


def require_batches(
    run: Callable[[NDArray[Any]], NDArray[Any]],
    inputs: NDArray[Any],
    expected: NDArray[Any],
    limit: float,
    *,
    max_batch: int,
) -> None:
    """Run the graph in batches of 1, 2 and 3 images and of the largest size, and compare the logits.

    run: function that runs the graph: inputs (B, …) → logits (B, C).
    inputs: (N, …), distinct inputs of the graph.  expected: (N, C), the logits of ``inputs``.
    limit: the largest allowed absolute difference.  max_batch: the largest batch that the graph must take.
    Errors: ExportError when a batch fails, or when its logits differ.
    """
    for size in sorted({size for size in (1, 2, 3, max_batch) if size <= max_batch}):
        rows = np.resize(np.arange(len(inputs)), size)
        try:
            logits = run(inputs[rows])
        except GmmvitError:
            raise
        # Each runtime raises an exception class of its own.
        except Exception as exc:
            reason = next(iter(str(exc).strip().splitlines()), type(exc).__name__)
            raise ExportError(f"the exported graph cannot run a batch of {size} images: {reason}", hint=_HINT) from exc
        shape = (size, *expected.shape[1:])
        if logits.shape != shape:
            raise ExportError(
                f"the exported graph, run with a batch of {size} images: expected logits of shape {shape}, got "
                f"{logits.shape}",
                hint=_HINT,
            )
        largest = float(np.abs(logits - expected[rows]).max())
        if not largest <= limit:  # also True if the difference is NaN
            raise ExportError(
                f"the exported graph, run with a batch of {size} images: expected logits within {limit:.3g} of "
                f"PyTorch's logits, got a difference of {largest:.3g}",
                hint=_HINT,
            )


def _inputs(proto: ModelProto) -> list[ValueInfoProto]:
    constants = {tensor.name for tensor in proto.graph.initializer}
    return [value for value in proto.graph.input if value.name not in constants]


def _batch(value: ValueInfoProto) -> str:
    """Return the name of the first dimension; empty if the dimension has a fixed size, no name, or does not exist."""
    dims = value.type.tensor_type.shape.dim
    return str(dims[0].dim_param) if dims else ""


def _shape(value: ValueInfoProto) -> str:
    dims = [dim.dim_param or dim.dim_value or "?" for dim in value.type.tensor_type.shape.dim]
    return f"({', '.join(map(str, dims))})"
