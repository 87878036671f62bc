"""Positions of tokens: sinusoids; position embeddings and bias tables at another image size, resampled on another grid.

P'[y, x] = Σ_{i,j} w((i − v(y)) / a) · w((j − u(x)) / b) · P[i, j]        divided by the sum of the weights

P (rows, columns, D) holds the embeddings of the patches of the old grid, and P' the embeddings of the new grid. Row y
of the new grid lies at row v(y) of the old grid; column x lies at column u(x), which has the same formula. w is Keys'
cubic kernel with the parameter A:

    w(t) = (A+2)·|t|³ − (A+3)·|t|² + 1              for |t| ≤ 1
    w(t) = A·|t|³ − 5A·|t|² + 8A·|t| − 4A           for 1 < |t| < 2, and 0 elsewhere

The code bases use different algorithms, where R is the old and R' the new number of rows:

    name         v(y)                            A       a               outside of the old grid   grids
    timm         (y + ½)·R/R' − ½                −0.5    max(1, R/R')    weight 0                  any → any
    torchvision  y·(R − 1)/(R' − 1)              −0.75   1               edge repeated             square → square
    deit         (y + ½)·R/R' − ½                −0.75   1               edge repeated             square → square
    dino         (y + ½)·R/(R' + 0.1) − ½        −0.75   1               edge repeated             square → any

    timm         timm; DINOv2 with registers
    torchvision  torchvision's ``interpolate_embeddings``
    deit         the fine-tuning code of DeiT; BEiT
    dino         DINO, and DINOv2 without registers

In the formula, b is the a of the columns. For random embeddings of unit variance, the largest difference between the
results of two algorithms is 0.26 to 1.13 (4 × 4 patches to 6 × 6 or 3 × 3), so the algorithm is part of the model. No
algorithm changes the embeddings of the prefix tokens (class token, distillation token, registers), and no algorithm
changes P if the grids are equal.

A relative position bias table (Swin, BEiT, relpos, MaxViT of timm) has a bias for each head and each offset
(Δrow, Δcolumn) of two tokens in a window. timm's ``resize_rel_pos_bias_table``, with which timm loads a file into a
model of another image size, interpolates linearly between offsets whose distances grow geometrically: the ratio makes
the offsets of the old window cover those of the new one, and the biases of near tokens change less than those of far
tokens.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gmmvit_deploy.errors import InputError, MissingDependencyError
from gmmvit_deploy.models.specs import Interpolation

Grid = tuple[int, int]
"""(rows, columns) of patches."""

_SQUARE_OLD: frozenset[Interpolation] = frozenset({"torchvision", "deit", "dino"})
_SQUARE_NEW: frozenset[Interpolation] = frozenset({"torchvision", "deit"})
_DINO_OFFSET = 0.1  # DINO's code adds it to the new number of rows and columns, against a size that rounds down


def resample_positions(
    positions: Float[Tensor, "1 tokens dim"],
    old_grid: Grid,
    new_grid: Grid,
    *,
    interpolation: Interpolation,
    prefix: int,
) -> Float[Tensor, "1 new_tokens dim"]:
    """Return the position embeddings for a grid of another size, in float32.

    positions: (1, prefix + rows·columns, D), first the prefix tokens, then the patches row by row.
    prefix: the number of prefix tokens that have a position embedding.
    Errors: InputError when the algorithm supports only square grids.
    """
    _refuse_oblong(interpolation, old_grid, new_grid)
    positions = positions.float()
    lattice = positions[:, prefix:].unflatten(1, old_grid).permute(0, 3, 1, 2)
    resampled = _interpolated(lattice, new_grid, interpolation).permute(0, 2, 3, 1).flatten(1, 2)
    return torch.cat([positions[:, :prefix], resampled], dim=1)


def _interpolated(
    lattice: Float[Tensor, "1 dim rows columns"], size: Grid, interpolation: Interpolation
) -> Float[Tensor, "1 dim new_rows new_columns"]:
    if interpolation == "timm":
        return nn.functional.interpolate(lattice, size=size, mode="bicubic", antialias=True)
    if interpolation == "torchvision":
        return nn.functional.interpolate(lattice, size=size, mode="bicubic", align_corners=True)
    if interpolation == "deit":
        return nn.functional.interpolate(lattice, size=size, mode="bicubic", align_corners=False)
    # PyTorch computes v(y) from a scale factor that is given, not from the sizes of the two grids.
    rows, columns = ((new + _DINO_OFFSET) / old for new, old in zip(size, lattice.shape[-2:], strict=True))
    return nn.functional.interpolate(lattice, scale_factor=(rows, columns), mode="bicubic")


def _refuse_oblong(interpolation: Interpolation, old_grid: Grid, new_grid: Grid) -> None:
    for name, grid, square in (("old", old_grid, _SQUARE_OLD), ("new", new_grid, _SQUARE_NEW)):
        if interpolation in square and grid[0] != grid[1]:
            raise InputError(
                f"--set interpolation={interpolation} is defined only for a square {name} grid of patches, because the "
                f"code of {interpolation} computes the side of the {name} grid as a square root or from one image "
                f"side; got {grid[0]} × {grid[1]} patches",
                hint="type --set interpolation=timm, whose algorithm supports every grid; the two algorithms give "
                "different networks, so measure the accuracy",
            )


_LONGEST_WAVE = 10000.0


def sinusoidal_positions(tokens: int, dim: int) -> Float[Tensor, "1 n dim"]:
    """Return the sinusoids P for tokens i and features j of the width D, in float32, rounded from float64.

    P[i, j] = sin(i / 10000^(j/D)) for even j,  cos(i / 10000^((j−1)/D)) for odd j
    """
    columns = torch.arange(dim)
    even = columns - columns % 2
    angles = torch.arange(tokens, dtype=torch.float64)[:, None] / _LONGEST_WAVE ** (even.double() / dim)
    return torch.where(columns % 2 == 0, angles.sin(), angles.cos()).float()[None]


_CLASS_TOKEN_ROWS = 3  # BEiT: class token to patch, patch to class token, class token to itself


def resample_bias_table(
    table: Float[Tensor, "offsets heads"], *, old_window: Grid, new_window: Grid
) -> Float[Tensor, "new_offsets heads"]:
    """Return the table for a window of another size, in float32.

    table: ((2·rows − 1)·(2·columns − 1), H), or 3 rows more with a class token (BEiT), which stay at its end.
    Errors: InputError when the table does not fit the old window, or a window that changes has a single row or column.
    """
    extra = table.shape[0] - _offsets(old_window)
    if extra not in (0, _CLASS_TOKEN_ROWS):
        raise InputError(
            f"relative position bias table: expected {_offsets(old_window)} rows for a window of {old_window[0]} × "
            f"{old_window[1]} tokens, or {_CLASS_TOKEN_ROWS} rows more with a class token, got {table.shape[0]} rows"
        )
    if old_window == new_window:
        return table.float()
    if min(*old_window, *new_window) < 2:
        raise InputError(
            "relative position bias table: a window with a single row or column has no offsets to interpolate between; "
            f"expected windows of at least 2 × 2 tokens, got {old_window[0]} × {old_window[1]} and "
            f"{new_window[0]} × {new_window[1]}"
        )
    try:
        from timm.layers.pos_embed_rel import resize_rel_pos_bias_table
    except ModuleNotFoundError as exc:
        raise MissingDependencyError("timm", extra="timm") from exc
    resized: Tensor = resize_rel_pos_bias_table(
        table.float(),
        new_window_size=new_window,
        new_bias_shape=(_offsets(new_window) + extra, table.shape[1]),
        old_window_size=old_window,
    )
    return resized


def _offsets(window: Grid) -> int:
    return (2 * window[0] - 1) * (2 * window[1] - 1)
