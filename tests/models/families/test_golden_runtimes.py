"""Exported golden checkpoints in OpenVINO and our kernels, in each precision: golden logits at four batch sizes, and
parity.

The models of timm are in tests/timm.
ONNX Runtime with its built-in operators is in tests/export/test_bundle.py and tests/parity/test_check.py.
Every test uses the shared exports of `tensor_bundles`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from gmmvit_deploy.bundle.artifacts import Bundle, open_bundle
from gmmvit_deploy.bundle.variants import open_variant
from gmmvit_deploy.errors import RunnerUnavailableError
from gmmvit_deploy.exporting.golden import fresh_inputs
from gmmvit_deploy.exporting.variants import variant_from_bundle
from gmmvit_deploy.inference.cores import int8_saturates
from gmmvit_deploy.inference.matcher import MatchedAttention, attentions_in
from gmmvit_deploy.inference.precision import Precision
from gmmvit_deploy.parity.check import check_parity
from gmmvit_deploy.runtimes.programs.image_batches import open_images
from gmmvit_deploy.runtimes.programs.openvino import read_graph
from gmmvit_deploy.runtimes.runners._openvino import OpenVinoRunner
from gmmvit_deploy.runtimes.runners.open import open_runner, open_runners
from gmmvit_deploy.runtimes.runners.runner import Runner
from tests.conftest import EXPORTED, LATER, MANIFEST, RELEASED, Golden, golden, once
from tests.runtimes.kernels.test_masked_attention import needs_bf16, needs_kernel

BATCHES = (1, 2, 5, 8)
NAMES = tuple(name for name in EXPORTED if name in RELEASED or name in LATER)
each_name = pytest.mark.parametrize(
    "name",
    [name if name in ("vit_gmm", "rmt_tiny_like") else pytest.param(name, marks=pytest.mark.nightly) for name in NAMES],
)
each_precision = pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=needs_bf16)])

KERNEL_ATTENTIONS = {
    **dict.fromkeys(("vit_plain", "vit_gmm", "vit_elm"), (3, 3)),
    **dict.fromkeys(("swin_plain", "swin_gmm"), (4, 4)),
    **dict.fromkeys(("cait_plain", "cait_gmm"), (5, 5)),
    **dict.fromkeys(("pit_plain", "pit_gmm"), (4, 4)),
    **dict.fromkeys(("t2t_plain", "t2t_gmm"), (2, 2)),
    "deepvit_patch": (3, 3),
    "eanet_performer": (0, 4),
    "eanet_transformer": (0, 5),
    "mnist_vit": (2, 2),
    "rmt_tiny_like": (6, 6),
    "rmt_2023": (9, 9),
    "sl_swin": (5, 5),
    "sl_cait": (5, 5),
    "sl_pit": (4, 4),
    "sl_t2t": (3, 3),
    "vp_deepvit": (0, 3),
    "vp_simple_vit": (2, 2),
    "vp_spt_lsa": (2, 2),
}
"""Golden checkpoint → the number of attentions that our kernels take, and the number of attentions of the graph."""


def require_golden(runner: Runner, case: Golden, recorded: float | None = None) -> None:
    """Compare the runner's logits with the golden float64 logits, within the limits of parity.

    recorded: for int8, the largest difference of the graph that conversion recorded.
    """
    expected, allowed = case.exact, case.limit(runner.precision, recorded=recorded)
    for batch in BATCHES:
        rows = np.arange(batch) % len(case.inputs)
        difference = np.abs(runner.run(case.inputs[rows]) - expected[rows]).max()
        assert difference <= allowed, f"{runner.label}, batch {batch}: {difference:.3g}, limit {allowed:.3g}"


def require_parity(runners: list[Runner], bundle: Bundle) -> None:
    report = check_parity(bundle, runners)
    assert not report.failed, report.failures()  # no image judges int8, which is then undecided
    for runner in report.runners:
        assert runner.check("batch invariance").details["batches"] == [1, 2, 3, 5, 8]


@each_precision
@each_name
def test_openvino(name: str, precision: Precision, tensor_bundles: dict[str, Bundle]) -> None:
    bundle = tensor_bundles[name]
    with open_runner("openvino", bundle, precision=precision) as runner:
        require_golden(runner, golden(name))
        require_parity([runner], bundle)


@each_name
def test_the_kernels_take_the_attentions_of_the_table(name: str, tensor_bundles: dict[str, Bundle]) -> None:
    matches = attentions_in(read_graph(tensor_bundles[name].onnx_path))
    taken = [match for match in matches if isinstance(match, MatchedAttention)]
    assert (len(taken), len(matches)) == KERNEL_ATTENTIONS[name]
    if name in RELEASED:
        masked = {record.layer for record in tensor_bundles[name].manifest.masks}
        assert {match.name for match in taken if match.mask is not None} == masked


@needs_kernel
@each_precision
@each_name
def test_our_kernels(name: str, precision: Precision, tensor_bundles: dict[str, Bundle]) -> None:
    """The kernels compute the golden logits, or no attention of the graph has a form that the kernels take."""
    bundle = tensor_bundles[name]
    taken, attentions = KERNEL_ATTENTIONS[name]
    names = ["openvino+kernels:bf16" if precision == "bf16" else "openvino+kernels"]
    if not taken:
        for runner_name in names:
            expected = pytest.raises(RunnerUnavailableError, match=f"no attention of this graph: 0 of {attentions}")
            with expected, open_runners([runner_name], bundle):
                pass
        return
    with open_runners(names, bundle) as runners:
        for runner in runners:
            assert runner.settings["attentions in our kernel"].startswith(f"{taken} of {attentions}")
            require_golden(runner, golden(name))
        require_parity(list(runners), bundle)


def with_int8(bundle: Bundle, folder: Path) -> Bundle:
    """Return a copy of the bundle with an int8 graph, calibrated with images of the form that parity uses."""

    def make(out: Path) -> None:
        staging = out.with_name(f"{out.name}.partial")
        shutil.rmtree(staging, ignore_errors=True)
        shutil.copytree(bundle.path, staging)
        images = np.concatenate([golden(bundle.path.name).inputs, fresh_inputs(bundle, 28, seed=7)])
        np.savez(staging.with_suffix(".npz"), images=images)
        opened = open_bundle(staging)
        calibration = open_images(opened, str(staging.with_suffix(".npz")), limit=len(images))
        variant_from_bundle(opened, "int8", calibration=calibration)
        staging.rename(out)

    return once(folder / f"{bundle.path.name}-int8", make)


ONE_OF_EACH_FAMILY = list({MANIFEST[name]["family"]: name for name in NAMES if name in LATER}.values())


@pytest.mark.nightly
@pytest.mark.parametrize("name", ONE_OF_EACH_FAMILY)
def test_int8_in_openvino(name: str, tensor_bundles: dict[str, Bundle], shared: Path) -> None:
    saturates = int8_saturates()
    if saturates and name != ONE_OF_EACH_FAMILY[0]:
        pytest.skip(saturates)  # a conversion takes half a minute
    bundle = with_int8(tensor_bundles[name], shared)
    record = open_variant(bundle, "int8", "static").record
    assert record is not None
    if saturates:
        assert saturates in record.programs["openvino"].get("skipped", saturates)
        pytest.skip(saturates)
    with open_runner("openvino", bundle, precision="int8") as runner:
        assert isinstance(runner, OpenVinoRunner)
        assert any("i8" in kernel for kernel in runner.program.kernels)
        require_golden(runner, golden(name), recorded=record.golden["largest_abs"])
        require_parity([runner], bundle)
