"""Relative position bias tables for windows of another size, against models that timm builds and resizes."""

from __future__ import annotations

import sys

import pytest
import torch

from gmmvit_deploy.errors import InputError, MissingDependencyError
from gmmvit_deploy.models.layers.bias_tables import resample_bias_table
from gmmvit_deploy.models.layers.positions import Grid


def table(window: Grid, extra: int = 0, heads: int = 3) -> torch.Tensor:
    rows = (2 * window[0] - 1) * (2 * window[1] - 1) + extra
    return torch.randn(rows, heads, generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize(("old", "new"), [((4, 4), (7, 7)), ((7, 7), (4, 4)), ((3, 5), (6, 4))])
def test_swin_equals_timm(old: Grid, new: Grid) -> None:
    swin = pytest.importorskip("timm.models.swin_transformer")
    attention = swin.WindowAttention(12, num_heads=3, window_size=old)
    trained = table(old)
    attention.relative_position_bias_table.data = trained.clone()
    attention.set_window_size(new)
    resampled = resample_bias_table(trained, old_window=old, new_window=new)
    assert resampled.equal(attention.relative_position_bias_table)


def test_the_rows_of_the_class_token_stay() -> None:
    beit = pytest.importorskip("timm.models.beit")
    module = beit.RelativePositionBias(window_size=(4, 4), num_heads=3)
    trained = table((4, 4), extra=3)
    module.relative_position_bias_table.data = trained.clone()
    resampled = resample_bias_table(trained, old_window=(4, 4), new_window=(6, 6))
    assert resampled.shape == (11 * 11 + 3, 3)
    assert resampled[-3:].equal(trained[-3:])
    module.set_window_size((6, 6))
    assert resampled.equal(module.relative_position_bias_table)


def test_an_equal_window_changes_nothing() -> None:
    trained = table((4, 4))
    assert resample_bias_table(trained, old_window=(4, 4), new_window=(4, 4)).equal(trained)


def test_a_table_of_another_window_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"expected 49 rows for a window of 4 × 4 tokens, or 3 rows more .* got 25 rows"
    ):
        resample_bias_table(table((3, 3)), old_window=(4, 4), new_window=(6, 6))
    with pytest.raises(InputError, match=r"no offsets to interpolate between; .* got 1 × 4 and 6 × 6"):
        resample_bias_table(table((1, 4)), old_window=(1, 4), new_window=(6, 6))


def test_the_error_without_timm_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm.layers.pos_embed_rel", None)
    with pytest.raises(MissingDependencyError) as caught:
        resample_bias_table(table((4, 4)), old_window=(4, 4), new_window=(6, 6))
    assert caught.value.hint == "pip install 'gmmvit-deploy[timm]'"
