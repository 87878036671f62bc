"""Compute the mean attention distance and the attention rollout from attention weights.

A[h, i, j] is the weight with which the query token i attends to the key token j in head h. The tokens are P prefix
tokens, for example a class token, and then the patches of a grid, row by row.

    distance[h] = mean over the patches i of  Σ_j A[h, i, j] · d_ij / Σ_j A[h, i, j]        j: the patches
    d_ij = √((Δrow · height)² + (Δcolumn · width)²)        between the centres of patches of height × width

    R = Â_L … Â_1        Â: A' + I, each row divided by its sum        A'[i, j]: the mean of A[h, i, j] over the heads

R[i, j] is the share of the input token j in the token i after L blocks. The identity I stands for the residual
connection. For weights whose rows sum to 1, Â = (A' + I) / 2.
Sources: Dosovitskiy et al., "An Image is Worth 16x16 Words", section 4.5 (distance) and appendix D.8 (rollout); Abnar
and Zuidema, "Quantifying Attention Flow in Transformers" (rollout).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

__all__ = ["Fusion", "mean_attention_distance", "rollout"]

Fusion = Literal["mean", "max", "min"]
"""How the heads of a layer become a single matrix A'."""


def mean_attention_distance(
    weights: NDArray[Any], grid: tuple[int, int], *, prefix: int = 0, patch: tuple[float, float] = (1.0, 1.0)
) -> NDArray[np.float64]:
    """Return the mean attention distance of each head, (H,); NaN for a head whose patches attend only to the prefix.

    weights: non-negative, (H, N, N), or (sequences, H, N, N) for several sequences of the same grid, such as windows;
    the result is then the mean over all sequences. N = prefix + rows · columns.
    grid: (rows, columns).  prefix: P.
    patch: (height, width) of a patch, in the unit of the result: (1, 1) for a distance in patches.
    Errors: ValueError when the number of tokens does not fit the grid.
    """
    rows, columns = grid
    if weights.shape[-2:] != (prefix + rows * columns,) * 2:
        raise ValueError(
            f"expected weights between {prefix} + {rows}·{columns} tokens, got {weights.shape[-2]} query tokens and "
            f"{weights.shape[-1]} key tokens"
        )
    between = (
        weights[..., prefix:, prefix:].astype(np.float64).reshape(-1, *weights.shape[-3:-2], *(rows * columns,) * 2)
    )
    down, right = (np.subtract.outer(places, places) for places in np.indices(grid).reshape(2, -1))
    distances = np.hypot(down * patch[0], right * patch[1])
    total = between.sum(axis=-1)
    # A patch that attends only to the prefix tokens has no distance.
    reached = total > 0
    means = np.divide((between * distances).sum(axis=-1), total, out=np.zeros_like(total), where=reached)
    count = reached.sum(axis=(0, 2))
    result: NDArray[np.float64] = np.divide(
        means.sum(axis=(0, 2)), count, out=np.full(len(count), np.nan), where=count > 0
    )
    return result


def rollout(layers: Sequence[NDArray[Any]], *, fusion: Fusion = "mean", discard: float = 0.0) -> NDArray[np.float64]:
    """Return the attention rollout R, (N, N); each row sums to 1.

    layers: the weights A of each layer, (H, N, N) and non-negative, in the order in which the layers run.
    fusion: how the heads become A'; the papers take the mean.
    discard: the share of the entries of A' to set to 0, the smallest first, except the entry [0, 0]; the papers
    discard no entry.
    Errors: ValueError when there is no layer, or when the shapes differ or the matrices are not square.
    """
    shapes = {layer.shape[-2:] for layer in layers}
    if len(shapes) != 1 or any(queries != keys for queries, keys in shapes):
        raise ValueError(f"expected weights (H, N, N) of the same N in each layer, got {sorted(shapes)}")
    identity = np.eye(layers[0].shape[-1])
    result = identity
    for layer in layers:
        fused = getattr(layer.astype(np.float64), fusion)(axis=0)
        if discard:
            smallest = np.argsort(fused, axis=None, kind="stable")[: int(fused.size * discard)]
            fused.flat[smallest[smallest != 0]] = 0.0
        residual = fused + identity
        result = (residual / residual.sum(axis=-1, keepdims=True)) @ result
    return result
