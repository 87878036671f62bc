"""The matcher: which attentions the kernel supports, why not the others, and masks as the kernel reads them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.inference.matcher import Refusal, attentions_in, summary_of
from gmmvit_deploy.inference.prepared_masks import prepared_mask
from gmmvit_deploy.runtimes.programs.openvino import read_graph
from tests.runtimes.kernels.test_masked_attention import graph

NOT_OVER_KEYS = "its softmax does not run over the keys, the last dimension"


def test_summary_gives_each_reason_once(tensor_bundles: dict[str, Bundle]) -> None:
    taken, refused = (
        attentions_in(read_graph(tensor_bundles[name].onnx_path)) for name in ("vit_gmm", "eanet_performer")
    )
    names = ", ".join(match.name for match in refused)
    assert summary_of([*taken, *refused]) == f"3 of 7; not: {names} ({NOT_OVER_KEYS})"
    assert summary_of(taken) == "3 of 3"


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"mask": (1, 20, 20)}, "its mask has shape (1, 20, 20), expected (2, 20, 20)"),
        ({"bias": (3, 2, 20, 20)}, "its bias has shape (3, 2, 20, 20), expected (2, 20, 20)"),
        ({"windows": [4], "axis": 3}, NOT_OVER_KEYS),
        (
            {"weights_are_used": True},
            "its attention weights are read by Relu, matrix product, expected only the matrix product with V",
        ),
        ({"before": True}, "Relu stands before its softmax, expected Q Kᵀ, a mask, a bias or head mixing"),
        ({"learned": True}, "its queries, keys and values differ in the batch dimension"),
    ],
    ids=str,
)
def test_each_refusal_has_its_reason(other: dict[str, Any], reason: str) -> None:
    model = graph(**other)
    (match,) = attentions_in(model)
    assert match == Refusal(match.name, reason)


# ---- masks -----------------------------------------------------------------------------------------------------------


def mask_on_grid(heads: int, n: int) -> np.ndarray:
    """Return (H, n, n): random, but equal for equal offsets in rows and columns; constant for the class token."""
    make = np.random.default_rng(n)
    g = math.isqrt(n)
    rows, columns = np.divmod(np.arange(g * g), g)
    apart = make.standard_normal((heads, 2 * g - 1, 2 * g - 1), dtype=np.float32)
    mask = np.empty((heads, n, n), np.float32)
    mask[:] = make.standard_normal((heads, 1, 1), dtype=np.float32)
    mask[:, -g * g :, -g * g :] = apart[:, rows[:, None] - rows + g - 1, columns[:, None] - columns + g - 1]
    return mask


@pytest.mark.parametrize("n", [64, 65, 196, 257])
def test_the_least_bit_in_one_place_is_another_mask(n: int) -> None:
    mask = mask_on_grid(2, n)
    grid = prepared_mask(mask, "f32")
    assert grid.grid == int(n**0.5)
    assert grid.numbers.nbytes < mask.nbytes / 3
    for place in ((1, 1, n // 2 + 2), (0, n - 1, n - 1), (1, n // 2, 3), (0, 0, 5)):
        other = mask.copy()
        other[place] = np.nextafter(other[place], np.float32(np.inf))
        whole = prepared_mask(other, "f32")
        # After multiplication by log2(e) two neighbours may become the same number, and so the same mask.
        same = np.float32(np.log2(np.e)) * other[place] == np.float32(np.log2(np.e)) * mask[place]
        assert whole.grid == (grid.grid if same else 0)
