"""The matcher: which attentions the kernel supports, and why not the others."""

from __future__ import annotations

from typing import Any

import pytest

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.inference.matcher import MatchedAttention, Refusal, attentions_in, attentions_in_onnx, summary_of
from tests.conftest import RELEASED
from tests.golden_files import each_export
from tests.runtimes.kernels.test_masked_attention import graph

NOT_OVER_KEYS = "its softmax does not run over the keys, the last dimension"
EXPECTED: dict[str, int] = {
    **dict.fromkeys(("vit_plain", "vit_gmm", "vit_elm", "vit_gmm_img64"), 3),
    **dict.fromkeys(("vit_gmm_256_tokens", "vit_gmm_head_dim", "vit_gmm_one_head"), 2),
    **dict.fromkeys(("swin_plain", "swin_gmm"), 4),
    "swin_gmm_whole_grid": 6,
    **dict.fromkeys(("cait_plain", "cait_gmm", "cait_elm"), 5),
    **dict.fromkeys(("pit_plain", "pit_elm", "pit_gmm"), 4),
    **dict.fromkeys(("t2t_plain", "t2t_gmm", "t2t_elm"), 2),
}
"""Golden checkpoint → number of its attentions, all of which the kernel takes."""


@pytest.mark.parametrize("name", each_export(RELEASED))
def test_the_kernel_takes_every_attention_of_every_family(name: str, tensor_bundles: dict[str, Bundle]) -> None:
    matches = attentions_in_onnx(tensor_bundles[name].onnx_path.read_bytes())
    assert [match.reason for match in matches if isinstance(match, Refusal)] == []
    assert len(matches) == EXPECTED[name]
    masked = {record.layer for record in tensor_bundles[name].manifest.masks}
    taken = [match for match in matches if isinstance(match, MatchedAttention)]
    assert {match.name for match in taken if match.mask is not None} == masked


def test_summary_gives_each_reason_once(tensor_bundles: dict[str, Bundle]) -> None:
    taken, refused = (
        attentions_in_onnx(tensor_bundles[name].onnx_path.read_bytes()) for name in ("cait_gmm", "eanet_performer")
    )
    names = ", ".join(match.name for match in refused)
    assert summary_of([*taken, *refused]) == f"5 of 9; not: {names} ({NOT_OVER_KEYS})"
    assert summary_of(taken) == "5 of 5"


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
