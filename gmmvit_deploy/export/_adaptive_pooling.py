"""Translate PyTorch's adaptive average pooling to ONNX, which has no such operator.

    images (B, C, H, W) of a multiple of the output's size     AveragePool
    other sizes, and single images (C, H, W)                   y = R x Cᵀ

Row i of the constant matrices R and C computes the mean of window i, from ⌊i · size / output⌋ to
⌈(i + 1) · size / output⌉, exclusively. PyTorch's exporter gathers the values of each window; OpenVINO 2026.4
computes some of these graphs wrongly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["adaptive_pooling_table"]


def adaptive_pooling_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return PyTorch's operator → the function that adds its nodes, a translation table for ``torch.onnx.export``."""
    import onnx_ir as ir
    import onnxscript
    import torch

    op: Any = onnxscript.opset20  # typed for tensors; the exporter passes values of the graph

    def pooled(x: Any, output_size: Sequence[int]) -> Any:
        sizes, outputs = [int(side) for side in x.shape[-2:]], list(output_size)
        if len(x.shape) == 4 and all(size % output == 0 for size, output in zip(sizes, outputs, strict=True)):
            window = [size // output for size, output in zip(sizes, outputs, strict=True)]
            return op.AveragePool(x, kernel_shape=window, strides=window)
        rows, columns = (means_of_windows(*pair) for pair in zip(sizes, outputs, strict=True))
        left, right = (op.Constant(value=ir.tensor(matrix)) for matrix in (rows, columns.T.copy()))
        return op.MatMul(op.MatMul(left, x), right)

    return {torch.ops.aten._adaptive_avg_pool2d.default: pooled}


def means_of_windows(size: int, output: int) -> NDArray[np.float32]:
    """Return the matrix (output, size) that computes the mean of each window of a dimension."""
    matrix = np.zeros((output, size), np.float32)
    for index in range(output):
        start, end = index * size // output, -((index + 1) * size // -output)
        matrix[index, start:end] = 1 / (end - start)
    return matrix
