"""Relative position bias tables of timm models (Swin, BEiT, relpos, MaxViT) for windows of another size.

table' = timm's ``resize_rel_pos_bias_table``: linear interpolation between offsets whose distances grow geometrically

A table has a bias for each head and each offset (Δrow, Δcolumn) of two tokens in a window of rows × columns tokens, so
(2·rows − 1)·(2·columns − 1) offsets. The ratio of the geometric progression is chosen so that the offsets of the old
window cover the offsets of the new window; the biases of near tokens change less than those of far tokens. timm uses
the same function when timm loads a file into a model of another image size, so this module calls timm's function.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from gmmvit_deploy.errors import InputError, MissingDependencyError
from gmmvit_deploy.models.layers.positions import Grid

_CLASS_TOKEN_ROWS = 3  # BEiT: class token to patch, patch to class token, class token to itself


def resample_bias_table(
    table: Float[Tensor, "offsets heads"], *, old_window: Grid, new_window: Grid
) -> Float[Tensor, "new_offsets heads"]:
    """Return the table for a window of another size, in float32.

    table: ((2·rows − 1)·(2·columns − 1), H), or 3 rows more if the window has a class token (BEiT). These rows stay at
    the end of the table, unchanged.
    old_window, new_window: (rows, columns) of the windows.
    Errors:
        InputError: the table does not fit the old window, or a window has fewer than 2 rows or columns and another size
            than the other window.
        MissingDependencyError: timm is not installed.
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
    """Return the number of offsets (Δrow, Δcolumn) between two tokens of a window."""
    return (2 * window[0] - 1) * (2 * window[1] - 1)
