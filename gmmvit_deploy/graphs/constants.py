"""The constants of a folded model, as the proofs of a graph read them, and the records that the proofs make.

`folding.fold.FoldedConstant` and `FoldedModel` implement the protocols `LayerConstant` and `LayerConstants`; this
module imports neither them nor torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["ConstantRecord", "LayerConstant", "LayerConstants", "MaskChange", "array_of", "bytes_of_array"]


class LayerConstant(Protocol):
    """A mask or bias of a layer.

    layer: name of the attention.  trained: the matrix of the trained module.  constant: the matrix in the graph.
    Both are values that ``numpy.asarray`` accepts.
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
    """The record of a layer's mask, or of its bias on the scores.

    shape: of the matrix.  constant: its name in ``model.onnx``.
    trained_sha256: of the little-endian float32 bytes of the matrix that the trained module multiplies by, or adds.
    constant_sha256: likewise of the constant in the graph, which is M·d^(−1/2) for a mask.
    """

    layer: str
    shape: tuple[int, ...]
    trained_sha256: str
    constant_sha256: str
    constant: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskChange:
    """The effect of a precision on a head's mask.

    head: its index; in a shifted Swin block w·H + h.  entries: number of entries, N².
    largest_change: largest absolute change of an entry.
    relative_change: largest |change| / |entry|, without flushed and saturated entries.
    flushed: number of entries that became 0.  subnormal: number that became subnormal, with fewer bits than the
    precision has.  saturated: number that became infinite.
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
    """Return an array, or a tensor on the CPU, as a numpy array; the tensor may require gradients."""
    import numpy as np

    array: NDArray[Any] = np.asarray(values.detach() if hasattr(values, "detach") else values)
    return array


def bytes_of_array(values: Any) -> bytes:
    """Return the values as little-endian float32 bytes in C order, the bytes of which a mask's SHA-256 is computed."""
    return array_of(values).astype("<f4", copy=False).tobytes()
