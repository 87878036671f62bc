"""Each golden checkpoint in each CPU runtime and precision: golden logits at four batch sizes, and parity.

The checkpoints of the paper's released code are in tests/export, tests/runtime and tests/kernels, the models of timm in
tests/timm. Parity of ONNX Runtime with its built-in operators is in tests/parity/test_check.py.
Every test uses the shared exports of `tensor_bundles`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

from gmmvit_deploy.artifacts import Bundle, open_bundle
from gmmvit_deploy.errors import RunnerUnavailableError
from gmmvit_deploy.export.variants import variant_from_bundle
from gmmvit_deploy.kernels.matcher import MatchedAttention
from gmmvit_deploy.kernels.onnxruntime_kernels import attentions_of_kernel
from gmmvit_deploy.parity.check import check_parity
from gmmvit_deploy.parity.inputs import fresh_inputs
from gmmvit_deploy.runners.open import open_runner, open_runners
from gmmvit_deploy.runners.openvino import OpenVinoRunner
from gmmvit_deploy.runners.runner import Runner
from gmmvit_deploy.runtime.image_batches import open_images
from gmmvit_deploy.tolerances import Noise, limit_from_noise
from gmmvit_deploy.variants import open_variant
from tests.conftest import LATER, Golden, golden, has_bf16, once
from tests.kernels.test_masked_attention import needs_kernel

BATCHES = (1, 2, 5, 8)
each_name = pytest.mark.parametrize("name", LATER)


def require_golden(runner: Runner, case: Golden, recorded: float | None = None) -> None:
    """Compare the runner's logits with the golden float64 logits, within the limits of parity.

    recorded: for int8, the largest difference of the graph that conversion recorded.
    """
    arrays = np.load(case.path.parent / f"{case.name}.npz")
    expected = arrays["logits64"] if "logits64" in arrays else case.logits.astype(np.float64)
    noise = Noise(largest=float(np.abs(case.logits - expected).max()), rms=0.0, scale=float(np.abs(expected).max()))
    allowed = limit_from_noise(noise, runner.precision, recorded=recorded).largest
    if runner.precision == "fp32":
        allowed = max(allowed, case.atol)  # four images can have less noise than the images of parity
    for batch in BATCHES:
        rows = np.arange(batch) % len(case.inputs)
        difference = np.abs(runner.run(case.inputs[rows]) - expected[rows]).max()
        assert difference <= allowed, f"{runner.label}, batch {batch}: {difference:.3g}, limit {allowed:.3g}"


def require_parity(runners: list[Runner], bundle: Bundle) -> None:
    report = check_parity(bundle, runners)
    assert report.passed, report.failures()
    for runner in report.runners:
        assert runner.check("batch invariance").details["batches"] == [1, 2, 3, 5, 8]


@each_name
def test_openvino(name: str, tensor_bundles: dict[str, Bundle]) -> None:
    bundle = tensor_bundles[name]
    names = ["onnxruntime", "openvino", *(["openvino:bf16"] if has_bf16() else [])]
    with open_runners(names, bundle) as runners:
        for runner in runners:
            require_golden(runner, golden(name))
        require_parity(list(runners[1:]), bundle)


@needs_kernel
@each_name
def test_our_kernels(name: str, tensor_bundles: dict[str, Bundle]) -> None:
    """The kernels compute the golden logits, or no attention of the graph has a form that the kernels take."""
    bundle = tensor_bundles[name]
    matches = attentions_of_kernel(onnx.load(bundle.onnx_path))
    taken = sum(isinstance(match, MatchedAttention) for match in matches)
    names = ["onnxruntime+kernels", "openvino+kernels", *(["openvino+kernels:bf16"] if has_bf16() else [])]
    if not taken:
        for runner_name in names:
            expected = pytest.raises(RunnerUnavailableError, match=f"no attention of this graph: 0 of {len(matches)}")
            with expected, open_runners([runner_name], bundle):
                pass
        return
    with open_runners(names, bundle) as runners:
        for runner in runners:
            assert runner.own_kernels
            require_golden(runner, golden(name))
        require_parity(list(runners), bundle)


def with_int8(bundle: Bundle, folder: Path) -> Bundle:
    """Return a copy of the bundle with an int8 graph, calibrated with images of the form that parity uses."""

    def make(out: Path) -> None:
        staging = out.with_name(f"{out.name}.partial")
        shutil.copytree(bundle.path, staging)
        images = np.concatenate([golden(bundle.path.name).inputs, fresh_inputs(bundle, 28, seed=7)])
        np.savez(staging.with_suffix(".npz"), images=images)
        opened = open_bundle(staging)
        calibration = open_images(opened, str(staging.with_suffix(".npz")), limit=len(images))
        variant_from_bundle(opened, "int8", calibration=calibration)
        staging.rename(out)

    return once(folder / f"{bundle.path.name}-int8", make)


@each_name
def test_int8_in_openvino(name: str, tensor_bundles: dict[str, Bundle], shared: Path) -> None:
    bundle = with_int8(tensor_bundles[name], shared)
    record = open_variant(bundle, "int8").record
    assert record is not None
    with open_runner("openvino", bundle, precision="int8") as runner:
        assert isinstance(runner, OpenVinoRunner)
        assert any("i8" in kernel for kernel in runner.program.kernels)
        require_golden(runner, golden(name), recorded=record.golden["largest_abs"])
        require_parity([runner], bundle)
