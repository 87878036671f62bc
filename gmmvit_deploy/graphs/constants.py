"""Types for the masks and biases of a folded model, and for the records about them in a bundle.

The checks of a graph take any object with the protocols `LayerConstant` and `LayerConstants`. The classes
`FoldedConstant` and `FoldedModel` in `folding.fold` implement the protocols. This module imports neither class, nor
torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["ConstantRecord", "LayerConstant", "LayerConstants", "MaskChange", "array_of", "bytes_of_array"]


class LayerConstant(Protocol):
    """A mask or bias on the scores of a layer.

    layer: the name of the attention.  trained: the matrix in the trained module.  constant: the matrix in the graph.
    Both matrices are values that ``numpy.asarray`` accepts.
    """

    @property
    def layer(self) -> str: ...

    @property
    def trained(self) -> Any: ...

    @property
    def constant(self) -> Any: ...


class LayerConstants(Protocol):
    """The masks and biases of a folded model."""

    @property
    def masks(self) -> Sequence[LayerConstant]: ...

    @property
    def biases(self) -> Sequence[LayerConstant]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantRecord:
    """Record of the mask of a layer, or of the bias on the scores of a layer.

    shape: the shape of the matrix.  constant: the name of the matrix in ``model.onnx``.
    trained_sha256: SHA-256 of the matrix that the trained module multiplies with the scores, or adds to the scores.
    constant_sha256: SHA-256 of the constant in the graph; for a mask M, the constant is M·d^(−1/2).
    Both hashes are of the little-endian float32 bytes.
    """

    layer: str
    shape: tuple[int, ...]
    trained_sha256: str
    constant_sha256: str
    constant: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskChange:
    """The effect of a precision on the mask of a head.

    head: the index of the head; in a shifted Swin block, w·H + h for head h of H in window w.
    entries: the number of entries of the mask, N².
    largest_change: the largest absolute change of an entry.
    relative_change: the largest |change| / |entry|, over the entries that are neither flushed nor saturated.
    flushed: the number of entries that became 0.
    subnormal: the number of entries that became subnormal, so that fewer significant bits remain.
    saturated: the number of entries that became infinite.
    """

    layer: str
    head: int
    entries: int
    largest_change: float
    relative_change: float
    flushed: int
    subnormal: int
    saturated: int


def array_of(values: Any) -> NDArray[Any]:
    """Return an array, or a tensor on the CPU, as a numpy array.  The tensor may require gradients."""
    import numpy as np

    array: NDArray[Any] = np.asarray(values.detach() if hasattr(values, "detach") else values)
    return array


def bytes_of_array(values: Any) -> bytes:
    """Return the values as little-endian float32 bytes in C order.  The hash of a mask is computed from these bytes."""
    return array_of(values).astype("<f4", copy=False).tobytes()
