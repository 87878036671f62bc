"""What the proofs of a graph ask of a folded model, its constants, layer by layer; and what they record.

`folding.fold.FoldedConstant` and `FoldedModel` have the shape of `LayerConstant` and `LayerConstants`; nothing here
imports them, or torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["ConstantRecord", "LayerConstant", "LayerConstants", "MaskChange", "array_of", "bytes_of_array"]


class LayerConstant(Protocol):
    """layer: name of the attention.  trained, constant: whatever ``numpy.asarray`` takes."""

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
    """What became of the mask, or of the bias on the scores, of one layer.

    trained_sha256: of the little-endian float32 bytes of the matrix that the trained module
    multiplies by, or adds; constant_sha256: likewise of the constant in the graph, for a mask M·d^(−1/2).
    constant: name of that constant in ``model.onnx``.  shape: of both.
    """

    layer: str
    shape: tuple[int, ...]
    trained_sha256: str
    constant_sha256: str
    constant: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskChange:
    """What a precision did to the mask of one head.

    head: index; in a shifted Swin block w·H + h.  entries: N².
    largest_change: of an entry, absolute; relative_change: the largest |change| / |entry|, entries
    that were flushed left out.  flushed: entries that became 0 and were not; subnormal: those that
    kept fewer bits than the precision has; saturated: those that became infinite.
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
    """A numpy array of an array or of a tensor on the CPU, one that records gradients included."""
    import numpy as np

    array: NDArray[Any] = np.asarray(values.detach() if hasattr(values, "detach") else values)
    return array


def bytes_of_array(values: Any) -> bytes:
    """The float32 values in C order, little-endian: what a mask's SHA-256 is taken of."""
    return array_of(values).astype("<f4", copy=False).tobytes()
