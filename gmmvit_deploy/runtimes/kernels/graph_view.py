"""The interface through which `matcher.py` reads a graph.

`onnx_view.py` implements the interface for ONNX graphs, and `openvino_view.py` for OpenVINO graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

__all__ = ["GraphView"]


class GraphView(Protocol):
    """A graph as the matcher reads it.

    value: a tensor of the graph, as the graph's library identifies tensors: a name in ONNX, an output of a node in
    OpenVINO.  Every shape is without the batch dimension.
    """

    def softmaxes(self) -> Sequence[Any]:
        """Return the output of every softmax, in the graph's order."""

    def name(self, value: Any) -> str:
        """Return the name of the operator that computes this value, such as ``blocks.0.attention/Softmax``."""

    def kind(self, value: Any) -> str:
        """Return the kind of the operator that computes this value.

        The kinds are ``matrix product`` (a MatMul that transposes neither input), ``multiplication`` and ``addition``
        (both elementwise), ``reshape``, ``transpose``, ``softmax`` and ``cast``. For any other operator, return the
        operator's name in the graph's library.
        """

    def inputs(self, value: Any) -> Sequence[Any]:
        """Return the inputs of the operator that computes this value."""

    def constant(self, value: Any) -> Any:
        """Return a constant as a numpy array, or None for a computed value."""

    def plain(self, value: Any) -> Any:
        """Return the value before the casts that produce this value, in a graph whose casts the kernel replaces.

        Such a graph is OpenVINO's; in an ONNX graph, where the kernel replaces no cast, return the value itself.
        """

    def reader(self, value: Any, *, through_casts: bool = False) -> Any:
        """Return the output of the only operator that reads this value, or None if the number of readers is not 1.

        through_casts: skip casts, in a graph whose casts the kernel replaces (see `plain`).
        """

    def readers(self, value: Any) -> list[str]:
        """Return the kinds of all operators that read this value."""

    def shape(self, value: Any) -> tuple[int, ...] | None:
        """Return the shape of this value, or None if a dimension is unknown."""

    def fixed_batch(self, value: Any) -> int | None:
        """Return the first dimension of this value if the graph fixes the dimension, otherwise None.

        A tensor that is the same for all images, such as a learned query, has the first dimension 1.
        """

    def target(self, value: Any) -> tuple[int, ...] | None:
        """Return the shape that this reshape produces, or None if a dimension is unknown."""

    def order(self, value: Any) -> list[int]:
        """Return the permutation of this transpose."""

    def axis(self, value: Any) -> int:
        """Return the axis of this softmax."""

    def columns(self, value: Any) -> tuple[Any, int, int] | None:
        """Return (source, index, outputs) if a Split cuts the last dimension of ``source`` equally.

        The value is output number ``index`` of this Split, and ``outputs`` is the number of the Split's outputs.
        Returns (value, 0, 1) if no Split computes the value, and None if the Split cuts in another way.
        """

    def refused_type(self, value: Any) -> str:
        """Return the type of this value if the kernel does not support the type, otherwise an empty string."""

    def takes_constant(self, array: Any) -> bool:
        """Return whether the kernel supports the type of this constant."""
