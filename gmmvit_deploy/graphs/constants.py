"""What the proofs of a graph ask of a folded model: its constants, layer by layer.

`folding.fold.FoldedConstant` and `FoldedModel` have this shape; nothing here imports them, or torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["LayerConstant", "LayerConstants", "array_of", "bytes_of_array"]


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


def array_of(values: Any) -> NDArray[Any]:
    """A numpy array of an array or of a tensor on the CPU, one that records gradients included."""
    import numpy as np

    array: NDArray[Any] = np.asarray(values.detach() if hasattr(values, "detach") else values)
    return array


def bytes_of_array(values: Any) -> bytes:
    """The float32 values in C order, little-endian: what a mask's SHA-256 is taken of."""
    return array_of(values).astype("<f4", copy=False).tobytes()
