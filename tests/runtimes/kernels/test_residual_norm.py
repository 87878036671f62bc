"""Our kernel of a residual sum, its LayerNorm and quantising replaces norms in graphs.

`against_formula.c` compares the kernel itself with the formula.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from openvino import opset13 as ops

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.bundle.variants import open_variant
from gmmvit_deploy.exporting.golden import fresh_inputs
from gmmvit_deploy.exporting.graphs_of_precisions import graph_from_model
from gmmvit_deploy.inference.int8_products import int8_saturates
from gmmvit_deploy.inference.openvino_program import CHUNK, OpenVinoProgram
from gmmvit_deploy.runtimes.programs.openvino import our_kernels
from gmmvit_deploy.runtimes.runners._openvino import OpenVinoRunner
from tests.conftest import small_swin
from tests.runtimes.kernels.test_masked_attention import needs_kernel


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def quantised(x: Any, step: float, levels: int = 256) -> Any:
    ends = [ops.constant(np.float32(bound)) for bound in (-128 * step, 127 * step, -128, 127)]
    grid = ops.convert(ops.fake_quantize(x, *ends, levels), "i8")
    return ops.multiply(ops.convert(grid, "f32"), ops.constant(np.asarray([step], np.float32)))


@pytest.mark.nightly
@needs_kernel
@pytest.mark.integration
@pytest.mark.skipif(bool(int8_saturates()), reason="int8 products saturate on this CPU")
def test_int8_values_move_between_the_windows_of_swin(tmp_path: Path) -> None:
    path = tmp_path / "swin.onnx"
    images = np.random.default_rng(1).standard_normal((CHUNK, 3, 16, 16), dtype=np.float32)
    made = graph_from_model(
        small_swin("gmm"), "int8", preprocessing=None, max_batch=CHUNK, calibration=[images], for_cpu=True
    )
    ir.save(made.model, path)
    kernels, _ = our_kernels("int8")
    ours = OpenVinoProgram(str(path), hint="f32", kernels=kernels)
    assert ours.fused_attentions == 4
    assert ours.fused_norms == 9  # two of each block and that of the merge: windows stand behind four of them
    kinds = Counter(node.get_type_name() for node in ours.model(CHUNK).get_ordered_ops())
    assert kinds["MVN"] == 2  # of the patches and of the mean: not quantised
    moved = [node for node in ours.model(CHUNK).get_ordered_ops() if node.get_type_name() in ("Transpose", "Gather")]
    types = Counter(node.get_output_element_type(0).get_type_name() for node in moved)
    assert types["i8"] == 4  # the windows of each block
    theirs = OpenVinoProgram(str(path), hint="f32").run(images)
    for batch in (1, CHUNK):
        off = ours.run(images[:batch]) - theirs[:batch]
        assert np.sqrt(np.mean(off**2)) < 0.02 * np.sqrt(np.mean(theirs**2))


@needs_kernel
def test_our_norms_run_in_a_chunk_and_not_for_a_single_image(precise_bundle: Bundle) -> None:
    variant = open_variant(precise_bundle, "int8", "static")
    with OpenVinoRunner(precise_bundle, variant, precision="int8", kernels=True) as runner:
        inputs = fresh_inputs(precise_bundle, CHUNK * runner.program.threads)
        program = runner.program
        assert program.fused_norms > 0
        assert runner.settings["norms"].startswith("our own")
        single = program.run(inputs[:1])
        ours = program.run(inputs)
        assert program.kernels["Reference ref_f32"] == program.fused_attentions + program.fused_norms
        kinds = [node.get_type_name() for node in program.model(1).get_ops()]
        assert kinds.count("ResidualNorm") == 0  # a single row: in our chains of products, or OpenVINO's
    with OpenVinoRunner(precise_bundle, variant, precision="int8") as runner:
        assert "norms" not in runner.settings
        theirs = runner.program.run(inputs)
    np.testing.assert_allclose(ours, theirs, atol=0.05 * float(np.abs(theirs).max()))
    np.testing.assert_allclose(single, ours[:1], atol=0.05 * float(np.abs(theirs).max()))
