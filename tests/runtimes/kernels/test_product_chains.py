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
from gmmvit_deploy.exporting.golden import fresh_inputs
from gmmvit_deploy.inference.openvino_kernels import Kernels
from gmmvit_deploy.runtimes.programs.openvino import our_kernels
from gmmvit_deploy.runtimes.runners._openvino import OpenVinoRunner
from tests.runtimes.kernels.test_masked_attention import needs_kernel
from tests.runtimes.kernels.test_residual_norm import numbers, quantised

WIDTH, HIDDEN, TOKENS = 48, 80, 16


@pytest.fixture
def kernels() -> Kernels:
    loaded, why = our_kernels("int8")
    if loaded is None or not loaded.multiplies_int8:
        pytest.skip(why if loaded is None else "this CPU has no AVX-512 VNNI, or has AMX")
    return loaded


def product(x: Any, seed: int, depth: int, width: int) -> Any:
    weights = np.random.default_rng(seed).integers(-127, 128, (depth, width)).astype(np.int8)
    steps = np.linspace(0.0002, 0.0008, width, dtype=np.float32)[None]
    values = ops.multiply(ops.convert(ops.constant(weights), "f32"), ops.constant(steps))
    return ops.add(ops.matmul(x, values, False, False), ops.constant(numbers(width, seed=seed)))


def unsigned(x: Any, step: float, zero: int, levels: int) -> Any:
    ends = [ops.constant(np.float32(bound)) for bound in (-zero * step, (255 - zero) * step, 0, 255)]
    grid = ops.convert(ops.fake_quantize(x, *ends, levels), "u8")
    values = ops.subtract(ops.convert(grid, "f32"), ops.constant(np.float32(zero)))
    return ops.multiply(values, ops.constant(np.float32(step)))


def activated(x: Any, form: str) -> Any:
    if form == "relu":
        return ops.relu(x)
    if form in ("silu", "quick"):
        return ops.multiply(x, ops.sigmoid(x if form == "silu" else ops.multiply(x, np.float32(1.702))))
    return ops.gelu(x, form)


def hidden_of(values: Any, seed: int, width: int, other: dict[str, Any]) -> Any:
    """Return the activation of a product of int8 values, also times another product of these values."""
    if other.get("gated") == "halves":  # one product of twice the columns
        both = product(values, seed, width, 2 * HIDDEN).output(0)
        split = ops.split(both, ops.constant(np.int64(2)), 2)
        return ops.multiply(activated(split.output(0), "silu"), split.output(1))
    hidden = activated(product(values, seed, width, HIDDEN), other.get("gelu", "erf"))
    return ops.multiply(hidden, product(values, seed + 3, width, HIDDEN)) if other.get("gated") else hidden


def graph(**other: Any) -> openvino.Model:
    """Return a model of MLP blocks, each x + product(Quantize(GELU(product(Quantize(norm(x)))))), and two products."""
    width = other.get("width", WIDTH)
    pixels = ops.parameter([-1, TOKENS, width], openvino.Type.f32)
    x = ops.add(pixels, ops.constant(numbers(1, TOKENS, width)))
    outputs = []
    for seed in (1, 2):
        normed = ops.mvn(x, ops.constant([-1]), True, 1e-5, "inside_sqrt")
        normed = ops.add(ops.multiply(normed, ops.constant(numbers(width, seed=seed))), ops.constant(numbers(width)))
        values = quantised(normed, 0.03)
        hidden = hidden_of(values, seed, width, other)
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
@pytest.mark.parametrize(
    ("other", "chains", "products"),
    [
        ({}, 2, 6),
        ({"sum_is_used": True}, 2, 6),  # the second block's product is stored, because the sum has another reader
        ({"hidden_is_used": True}, 4, 6),  # the next chain quantises the GELU
        ({"gelu": "tanh"}, 2, 6),
        ({"gelu": "silu"}, 2, 6),
        ({"gelu": "quick"}, 2, 6),
        ({"gelu": "silu", "gated": "products"}, 2, 8),  # SwiGLU
        ({"gelu": "erf", "gated": "products"}, 2, 8),  # GEGLU
        ({"gated": "halves"}, 2, 6),
        ({"gelu": "relu"}, 4, 6),
        ({"levels": 255}, 0, 0),  # too many products would be left
        ({"width": 24}, 0, 0),
        ({"cores": 3}, 0, 0),  # 16 tokens are too few
    ],
    ids=str,
)
def test_chains_of_int8_products_are_replaced(
    kernels: Kernels, other: dict[str, Any], chains: int, products: int
) -> None:
    plain, model = graph(**other), graph(**other)
    kernels.fuse_norms(model)
    assert kernels.fuse_products(model, cores=other.get("cores", 2)) == products
    kinds = [node.get_type_name() for node in model.get_ordered_ops()]
    assert kinds.count("ProductChain") == chains
    assert kinds.count("MatMul") == ([node.get_type_name() for node in plain.get_ops()].count("MatMul") - products)
    assert_near(plain, model)


def assert_near(plain: openvino.Model, model: openvino.Model) -> None:
    """A value near the middle of two steps may fall to the other step, and moves what the next product multiplies."""
    batch = numbers(3, *(int(str(size)) for size in list(plain.inputs[0].partial_shape)[1:]), seed=9)
    settings = {"INFERENCE_PRECISION_HINT": "f32"}
    expected = openvino.compile_model(plain, "CPU", settings)(batch)
    answers = openvino.compile_model(model, "CPU", {**settings, "LP_TRANSFORMS_MODE": "NO"})(batch)
    for index in range(len(plain.outputs)):
        off = answers[index] - expected[index]
        assert np.sqrt(np.mean(off**2)) < 0.01 * np.sqrt(np.mean(expected[index] ** 2))


@needs_kernel
def test_a_sum_of_two_products_joins_one_chain(kernels: Kernels) -> None:
    pixels = ops.parameter([-1, TOKENS, WIDTH], openvino.Type.f32)
    values = [quantised(ops.relu(pixels), step) for step in (0.02, 0.03)]
    both = ops.add(product(values[0], 1, WIDTH, WIDTH), product(values[1], 2, WIDTH, WIDTH))
    model = openvino.Model([ops.relu(both).output(0)], [pixels], "sum")
    plain = model.clone()
    assert kernels.fuse_products(model, cores=1) == 2
    assert [node.get_type_name() for node in model.get_ops()].count("ProductChain") == 2
    assert_near(plain, model)


@needs_kernel
def test_what_is_broadcast_is_not_added_in_a_chain(kernels: Kernels) -> None:
    pixels = ops.parameter([-1, TOKENS, WIDTH], openvino.Type.f32)
    mean = ops.reduce_mean(pixels, ops.constant([0]), True)  # of the batch: (1, tokens, width)
    both = ops.add(product(quantised(ops.relu(pixels), 0.02), 1, WIDTH, WIDTH), mean)
    model = openvino.Model([ops.relu(both).output(0)], [pixels], "broadcast")
    plain = model.clone()
    assert kernels.fuse_products(model, cores=1) == 1
    assert_near(plain, model)


@needs_kernel
def test_our_products_run_for_rows_that_all_cores_share(kernels: Kernels, precise_bundle: Bundle) -> None:
    variant = open_variant(precise_bundle, "int8", "static")
    inputs = fresh_inputs(precise_bundle, 4)
    with OpenVinoRunner(precise_bundle, variant, precision="int8", kernels=True, threads=2) as runner:
        program = runner.program
        assert program.fused_products > 0
        assert runner.settings["int8 products"] == "our own for fewer than 4 images"
        chains = [node.get_type_name() for node in program.model(1, shared=True).get_ops()].count("ProductChain")
        alone = np.concatenate([program.run(inputs[row : row + 1]) for row in range(4)])
        ours = [count for name, count in program.kernels.items() if name.startswith("Reference")]
        assert sum(ours) == program.fused_attentions + chains
        together = program.run(inputs)  # two rows on each core
        assert program.kernels["Reference ref_f32"] == program.fused_attentions + program.fused_norms
    with OpenVinoRunner(precise_bundle, variant, precision="int8", threads=2) as runner:
        theirs = runner.program.run(inputs)
    for answers in (alone, together):
        np.testing.assert_allclose(answers, theirs, atol=0.05 * float(np.abs(theirs).max()))
