"""Types for the masks and biases of a folded model, and for the records in a bundle about these masks and biases.

A mask multiplies the scores Q Kᵀ of an attention elementwise, and a bias is added to the scores. A folded model stores
each as a constant. `LayerConstant` stands for ``FoldedConstant`` of the folding, which needs torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from numpy.typing import NDArray


class LayerConstant(Protocol):
    """The mask, or the bias, on the scores of an attention.

    layer: the name of the attention.  constant: the matrix in the graph, an array or a tensor on the CPU.
    """

    @property
    def layer(self) -> str: ...

    @property
    def constant(self) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantRecord:
    """Record of the mask, or of the bias, on the scores of an attention.

    layer: the name of the attention.  shape: the shape of the matrix.
    constant: the name of the constant in ``model.onnx`` that stores the matrix. For a mask M, the constant is
    M · d^(−1/2) if folding merged the factor d^(−1/2) into the mask.
    constant_sha256: the SHA-256 of the constant's little-endian float32 bytes in the graph.
    """

    layer: str
    shape: tuple[int, ...]
    constant_sha256: str
    constant: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskChange:
    """The effect of a precision on the mask of a head.

    layer: the name of the attention.
    head: the index of the head; in a shifted Swin block with H heads, w·H + h for the head h of the window w.
    entries: the number of entries of the mask, N² for N tokens.
    largest_change: the largest absolute change of an entry.
    relative_change: the largest |change| / |entry| of the entries that became neither 0 nor infinite.
    flushed: the number of nonzero entries that became 0.
    subnormal: the number of entries that became subnormal, with fewer significant bits.
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
    """Convert an array, or a tensor on the CPU, to a numpy array."""
    import numpy as np

    array: NDArray[Any] = np.asarray(values.detach() if hasattr(values, "detach") else values)
    return array


def bytes_of_array(values: Any) -> bytes:
    """Return the values as little-endian float32 bytes in C order, of which the SHA-256 of a mask is computed."""
    return array_of(values).astype("<f4", copy=False).tobytes()
