from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest

from gmmvit_deploy.artifacts import Bundle
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.parity.check import ParityResult, batch_sizes, check_parity, open_runner
from gmmvit_deploy.runtime.onnxruntime import OnnxRuntimeRunner
from gmmvit_deploy.tolerances import FP32
from tests.conftest import NAMES


class Altered(OnnxRuntimeRunner):
    """A runner that is wrong in one way."""

    def __init__(self, bundle: Bundle, change: Callable[[np.ndarray], np.ndarray]) -> None:
        super().__init__(bundle)
        self._change = change

    def _run(self, batch: np.ndarray) -> np.ndarray:
        return self._change(super()._run(batch))


def check(bundle: Bundle, change: Callable[[np.ndarray], np.ndarray]) -> ParityResult:
    with Altered(bundle, change) as runner:
        return check_parity(bundle, runner)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("runner", ["eager", "onnxruntime"])
def test_right_runners_pass(name: str, runner: str, tensor_bundles: dict[str, Bundle]) -> None:
    with open_runner(runner, tensor_bundles[name]) as opened:
        result = check_parity(tensor_bundles[name], opened)
    assert result.passed, result.to_json()
    # every batch size against both references: 1, 2, 3, odd, max
    assert [(c.reference, c.batch) for c in result.comparisons] == [
        (reference, batch) for reference in ("golden", "eager") for batch in (1, 2, 3, 5, 8)
    ]


def test_an_untouched_runner_passes(bundle: Bundle) -> None:
    assert check(bundle, lambda logits: logits).passed


def _only_first_row(logits: np.ndarray) -> np.ndarray:
    return np.repeat(logits[:1], len(logits), axis=0)


@pytest.mark.parametrize(
    "change",
    [
        lambda logits: logits + np.float32(1e-4),
        lambda logits: logits.astype(np.float16).astype(np.float32),
        lambda logits: logits[:, ::-1],
        lambda logits: logits[::-1],
        _only_first_row,
        lambda logits: np.where(np.arange(logits.shape[1]) == 3, np.nan, logits),
        lambda logits: logits[:, :-1],
        lambda logits: logits if len(logits) < 8 else logits + 1,
        lambda logits: np.zeros_like(logits),
    ],
    ids=[
        "shifted",
        "fp16",
        "classes",
        "rows",
        "batch 1 only",
        "nan",
        "too few classes",
        "wrong at the maximum",
        "zero",
    ],
)
def test_wrong_runners_fail(change: Callable[[np.ndarray], np.ndarray], bundle: Bundle) -> None:
    result = check(bundle, change)
    assert not result.passed
    assert json.loads(json.dumps(result.to_json(), allow_nan=False))["passed"] is False


def test_a_wrong_argmax_is_counted(bundle: Bundle) -> None:
    assert check(bundle, lambda logits: -logits).to_json()["argmax_agreement"] < 0.5


def test_limit_is_far_below_what_a_wrong_mask_does(bundle: Bundle) -> None:
    assert FP32.limit(bundle.golden()[1]) < 5e-5


@pytest.mark.parametrize(
    ("largest", "wanted"), [(1, (1,)), (2, (1, 2)), (4, (1, 2, 3, 4)), (8, (1, 2, 3, 5, 8)), (64, (1, 2, 3, 33, 64))]
)
def test_batch_sizes(largest: int, wanted: tuple[int, ...]) -> None:
    assert batch_sizes(largest) == wanted


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "tensorflow"}, "is not known"),
        ({"name": "onnxruntime", "url": "grpc://localhost:1"}, "runs in this process"),
        ({"name": "triton-grpc", "url": "http://localhost:1"}, "speaks grpc"),
    ],
)
def test_runner_names(arguments: dict[str, str], message: str, bundle: Bundle) -> None:
    name = arguments.pop("name")
    with pytest.raises(InputError, match=message):
        open_runner(name, bundle, **arguments)
