"""A graph whose batch came out fixed is refused, by its types and by running it."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

from gmmvit_deploy.errors import ExportError, ServerError
from gmmvit_deploy.export._numeric_proof import require_batches
from gmmvit_deploy.export.onnx_from_model import require_dynamic_batch

INPUTS = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
LOGITS = INPUTS[:, :2] * 2


def graph(batch_in: object, batch_out: object) -> object:
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (("tensor", (batch_in, 3)), ("logits", (batch_out, 3)))
    ]
    node = helper.make_node("Identity", ["tensor"], ["logits"])
    return helper.make_model(helper.make_graph([node], "g", values[:1], values[1:]))


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ((2, 2), r"fixed batch: expected a dynamic first dimension of tensor, got \(2, 3\)"),
        (("batch", 2), r"fixed batch: expected a dynamic first dimension of logits, got \(2, 3\)"),
        (("batch", None), r"fixed batch: expected a dynamic first dimension of logits, got \(\?, 3\)"),
        (("batch", "s0"), r"expected the same batch .*, got tensor \(batch, 3\), logits \(s0, 3\)"),
    ],
    ids=str,
)
def test_a_batch_that_is_not_dynamic(batches: tuple[object, object], message: str) -> None:
    with pytest.raises(ExportError, match=message) as caught:
        require_dynamic_batch(graph(*batches))
    assert "x.shape[0] in place of len(x)" in caught.value.hint


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda batch: batch[:2, :2] * 2, r"batch of 3 images: expected logits of shape \(3, 2\), got \(2, 2\)"),
        (
            lambda batch: batch[:, :2] * (2 if len(batch) < 9 else 3),
            "batch of 9 images: the logits differ .* at most 1e-06",
        ),
        (
            lambda batch: batch[:, :2] * (2 if len(batch) > 1 else np.nan),
            "batch of 1 images: the logits differ .* by nan",
        ),
        (lambda batch: batch[:, :2] * 2 if len(batch) < 3 else 1 / 0, "cannot run a batch of 3 images: division by"),
    ],
    ids=["shape", "largest", "nan", "raises"],
)
def test_a_graph_that_is_wrong_at_one_size(wrong: object, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        require_batches(wrong, INPUTS, LOGITS, 1e-6, max_batch=9)  # type: ignore[arg-type]


def test_errors_of_this_package_pass() -> None:
    def run(batch: np.ndarray) -> np.ndarray:
        raise ServerError("gone")

    with pytest.raises(ServerError):
        require_batches(run, INPUTS, LOGITS, 1e-6, max_batch=2)
