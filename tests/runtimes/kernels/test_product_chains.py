"""Our kernel of int8 products computes a block's row-wise steps for the rows that all cores share.

`against_formula.c` compares the kernel itself with the formulas.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino
import pytest
from openvino import opset13 as ops

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.bundle.variants import open_variant
from gmmvit_deploy.parity.inputs import fresh_inputs
from gmmvit_deploy.runtimes.programs.openvino import our_kernels
from gmmvit_deploy.runtimes.runners._openvino import OpenVinoRunner
from tests.runtimes.kernels.test_masked_attention import needs_kernel
from tests.runtimes.kernels.test_residual_norm import numbers, quantised

WIDTH, HIDDEN, TOKENS = 48, 80, 16


def has_kernel() -> bool:
    kernels, _ = our_kernels("int8")
    return kernels is not None and kernels.multiplies_int8


needs_int8_kernel = pytest.mark.skipif("not __import__(__name__, fromlist=['*']).has_kernel()", reason="needs VNNI")


def product(x: Any, seed: int, depth: int, width: int) -> Any:
    weights = np.random.default_rng(seed).integers(-127, 128, (depth, width)).astype(np.int8)
    values = ops.multiply(ops.convert(ops.constant(weights), "f32"), ops.constant(np.float32(0.0005)))
    return ops.add(ops.matmul(x, values, False, False), ops.constant(numbers(width, seed=seed)))


def unsigned(x: Any, step: float, zero: int, levels: int) -> Any:
    ends = [ops.constant(np.float32(bound)) for bound in (-zero * step, (255 - zero) * step, 0, 255)]
    grid = ops.convert(ops.fake_quantize(x, *ends, levels), "u8")
    values = ops.subtract(ops.convert(grid, "f32"), ops.constant(np.float32(zero)))
    return ops.multiply(values, ops.constant(np.float32(step)))


def graph(**other: Any) -> openvino.Model:
    """Return a model of MLP blocks, each x + product(Quantize(GELU(product(Quantize(norm(x)))))), and two products."""
    width = other.get("width", WIDTH)
    pixels = ops.parameter([-1, TOKENS, width], openvino.Type.f32)
    x = ops.add(pixels, ops.constant(numbers(1, TOKENS, width)))
    outputs = []
    for seed in (1, 2):
        normed = ops.mvn(x, ops.constant([-1]), True, 1e-5, "inside_sqrt")
        normed = ops.add(ops.multiply(normed, ops.constant(numbers(width, seed=seed))), ops.constant(numbers(width)))
        hidden = ops.gelu(product(quantised(normed, 0.03), seed, width, HIDDEN), other.get("gelu", "erf"))
        if other.get("hidden_is_used"):
            outputs.append(ops.relu(hidden).output(0))
        branch = product(unsigned(hidden, 0.02, 9, other.get("levels", 256)), seed + 5, HIDDEN, width)
        x = ops.add(x, branch)
        if other.get("sum_is_used"):
            outputs.append(ops.relu(x).output(0))
    last = quantised(ops.relu(x), 0.05)  # an int8 value that two products read
    ends = [product(last, seed, width, width) for seed in (8, 9)]
    return openvino.Model([end.output(0) for end in ends] + outputs, [pixels], "blocks")


@needs_kernel
@needs_int8_kernel
@pytest.mark.parametrize(
    ("other", "chains", "products"),
    [
        ({}, 2, 6),
        ({"sum_is_used": True}, 2, 6),  # the second block's product is stored, because the sum has another reader
        ({"hidden_is_used": True}, 4, 6),  # the next chain quantises the GELU
        ({"gelu": "tanh"}, 4, 6),
        ({"levels": 255}, 0, 0),  # too many products would be left
        ({"width": 24}, 0, 0),
        ({"cores": 3}, 0, 0),  # 16 tokens are too few
    ],
    ids=str,
)
def test_chains_of_int8_products_are_replaced(other: dict[str, Any], chains: int, products: int) -> None:
    kernels, _ = our_kernels("int8")
    assert kernels is not None
    plain, model = graph(**other), graph(**other)
    kernels.fuse_norms(model)
    assert kernels.fuse_products(model, cores=other.get("cores", 2)) == products
    kinds = [node.get_type_name() for node in model.get_ordered_ops()]
    assert kinds.count("ProductChain") == chains
    assert kinds.count("MatMul") == 6 - products
    batch = numbers(3, TOKENS, other.get("width", WIDTH), seed=9)
    settings = {"INFERENCE_PRECISION_HINT": "f32"}
    expected = openvino.compile_model(plain, "CPU", settings)(batch)
    answers = openvino.compile_model(model, "CPU", {**settings, "LP_TRANSFORMS_MODE": "NO"})(batch)
    for index in range(len(plain.outputs)):
        # A value near the middle of two steps may fall to the other step, and moves what the next product multiplies.
        off = answers[index] - expected[index]
        assert np.sqrt(np.mean(off**2)) < 0.01 * np.sqrt(np.mean(expected[index] ** 2))


@needs_kernel
@needs_int8_kernel
def test_our_products_run_for_a_single_image_and_not_in_a_chunk(precise_bundle: Bundle) -> None:
    variant = open_variant(precise_bundle, "int8", for_cpu=True)
    with OpenVinoRunner(precise_bundle, variant, precision="int8", kernels=True, threads=2) as runner:
        program = runner.program
        inputs = fresh_inputs(precise_bundle, 4)
        assert program.fused_products > 0
        assert runner.settings["int8 products"] == "our own for less than 4 rows"
        kinds = [[node.get_type_name() for node in program.model(rows).get_ops()] for rows in (1, 3, 4)]
        assert [names.count("ProductChain") > 0 for names in kinds] == [True, True, False]
        alone = np.concatenate([program.run(inputs[row : row + 1]) for row in range(4)])
        together = program.run(inputs)
    np.testing.assert_allclose(alone, together, atol=0.05 * float(np.abs(together).max()))
