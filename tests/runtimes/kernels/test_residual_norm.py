"""Our kernel of a residual sum, its LayerNorm and quantising replaces norms in graphs; no other graph is changed.

`against_formula.c` compares the kernel itself with the formula.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import openvino
import pytest
from openvino import opset13 as ops

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.bundle.variants import open_variant
from gmmvit_deploy.exporting.golden import fresh_inputs
from gmmvit_deploy.exporting.graphs_of_precisions import graph_from_model
from gmmvit_deploy.inference.cores import int8_saturates
from gmmvit_deploy.inference.openvino_program import CHUNK, OpenVinoProgram
from gmmvit_deploy.runtimes.programs.openvino import our_kernels
from gmmvit_deploy.runtimes.runners._openvino import OpenVinoRunner
from tests.conftest import small_swin
from tests.runtimes.kernels.test_masked_attention import needs_kernel

WIDTH, STEP = 48, np.float32(0.03)


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def quantised(x: Any, step: float, levels: int = 256) -> Any:
    ends = [ops.constant(np.float32(bound)) for bound in (-128 * step, 127 * step, -128, 127)]
    grid = ops.convert(ops.fake_quantize(x, *ends, levels), "i8")
    return ops.multiply(ops.convert(grid, "f32"), ops.constant(np.asarray([step], np.float32)))


def product(x: Any, seed: int, width: int) -> Any:
    weights = np.random.default_rng(seed).integers(-127, 128, (width, width)).astype(np.int8)
    values = ops.multiply(ops.convert(ops.constant(weights), "f32"), ops.constant(np.float32(0.001)))
    return ops.matmul(x, values, False, False)


def graph(**other: Any) -> openvino.Model:
    """Return a model of two residual blocks, each x + product(Quantize(norm(x))) twice."""
    width = other.get("width", WIDTH)
    pixels = ops.parameter([-1, 4, width], openvino.Type.f32)
    x = ops.add(pixels, ops.constant(numbers(1, 4, width)))
    outputs = []
    for seed in range(1, 1 + other.get("blocks", 2)):
        normed = ops.mvn(x, ops.constant([other.get("axis", -1)]), True, 1e-5, other.get("epsilon", "inside_sqrt"))
        normed = ops.multiply(normed, ops.constant(numbers(width, seed=seed)))
        normed = ops.add(normed, ops.constant(numbers(width, seed=seed + 10)))
        if other.get("moved"):  # rolled by a token, turned, and back
            first, rest = ops.variadic_split(normed, ops.constant(1), ops.constant([1, 3])).outputs()
            others = ops.relu(first).output(0) if other.get("joined_with_others") else first
            turned = ops.transpose(ops.concat([rest, others], 1), ops.constant([0, 2, 1]))
            back = ops.transpose(turned, ops.constant([0, 2, 1]))
            rest, first = ops.variadic_split(back, ops.constant(1), ops.constant([3, 1])).outputs()
            normed = ops.concat([first, rest], 1)
        steps = (float(STEP), float(STEP) * (1 + other.get("second_grid", 0)))
        branches = [
            product(quantised(normed, step, other.get("levels", 256)), seed + which, width)
            for which, step in enumerate(steps)
        ]
        x = ops.add(x, ops.add(branches[0], branches[1]))
        if other.get("norm_is_used"):
            outputs.append(ops.relu(normed).output(0))
    last = ops.relu(x) if other.get("nothing_else") else product(quantised(ops.relu(x), 0.05), 5, width)
    return openvino.Model([last.output(0), *outputs], [pixels], "norms")


@pytest.mark.first(2)
@needs_kernel
@pytest.mark.parametrize(
    ("other", "replaced"),
    [
        ({}, 2),
        ({"blocks": 1}, 1),
        ({"axis": 2, "blocks": 1}, 1),
        ({"axis": 1}, 0),
        ({"width": 24}, 0),
        ({"levels": 255}, 0),
        ({"second_grid": 1}, 0),
        ({"norm_is_used": True}, 0),
        ({"moved": True, "blocks": 1}, 1),
        ({"moved": True, "joined_with_others": True, "blocks": 1}, 0),
        ({"epsilon": "outside_sqrt"}, 0),
        ({"nothing_else": True}, 0),  # of what is quantised
    ],
    ids=str,
)
def test_only_quantised_norms_are_replaced(other: dict[str, Any], replaced: int) -> None:
    kernels, _ = our_kernels("int8")
    assert kernels is not None
    plain, model = graph(**other), graph(**other)
    assert kernels.fuse_norms(model) == replaced
    kinds = [node.get_type_name() for node in model.get_ordered_ops()]
    assert kinds.count("ResidualNorm") == replaced
    assert kinds.count("MVN") == other.get("blocks", 2) - replaced
    batch = numbers(3, 4, other.get("width", WIDTH), seed=9)
    answers = [
        openvino.compile_model(network, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(batch)[0].copy()
        for network in (plain, model)
    ]
    if not replaced:
        np.testing.assert_array_equal(answers[1], answers[0])
    else:  # a value near the middle of two steps may fall to the other step, and moves what the next block quantises
        assert np.sqrt(np.mean((answers[1] - answers[0]) ** 2)) < 0.01 * np.sqrt(np.mean(answers[0] ** 2))


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
