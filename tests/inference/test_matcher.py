"""The matcher: which attentions the kernel supports, and why not the others."""

from __future__ import annotations

from typing import Any

import pytest

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.inference.matcher import Refusal, attentions_in, summary_of
from gmmvit_deploy.runtimes.programs.openvino import read_graph
from tests.runtimes.kernels.test_masked_attention import graph

NOT_OVER_KEYS = "its softmax does not run over the keys, the last dimension"


def test_summary_gives_each_reason_once(tensor_bundles: dict[str, Bundle]) -> None:
    taken, refused = (
        attentions_in(read_graph(tensor_bundles[name].onnx_path)) for name in ("cait_gmm", "eanet_performer")
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
