"""Our attention kernel replaces attentions in graphs, and gives the same answers; no other form is replaced.

`against_formula.c` compares the kernel itself with the formula.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino
import pytest
from openvino import opset13 as ops

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.exporting.golden import fresh_inputs
from gmmvit_deploy.inference.openvino_kernels import Kernels, kernels_from
from gmmvit_deploy.inference.precision import Arithmetic
from gmmvit_deploy.runtimes.kernels import libraries as compiling
from gmmvit_deploy.runtimes.kernels.libraries import openvino_library
from gmmvit_deploy.runtimes.programs.openvino import our_kernels
from gmmvit_deploy.runtimes.runners.open import open_runner

_KERNELS, _WHY = our_kernels("fp32")
needs_kernel = pytest.mark.skipif(
    # A kernel that does not compile is a failure, and no reason to skip.
    _KERNELS is None and any(why in _WHY for why in ("this processor has neither", "x86-64", "no C++ compiler")),
    reason=f"no kernel here: {_WHY}",
)
needs_bf16 = pytest.mark.skipif(
    _KERNELS is None or our_kernels("bf16")[1] != "bf16", reason="our kernels have no bf16 on this CPU"
)
F32, BF16 = 1, 2


def loaded(arithmetic: Arithmetic) -> Kernels:
    kernels, _ = our_kernels("bf16" if arithmetic == "bf16" else "fp32")
    assert kernels is not None
    assert kernels.arithmetic == arithmetic
    return kernels


def graph(**other: Any) -> openvino.Model:
    """Return a masked attention as an exporter writes it.  other: changes of the form."""
    heads, n, d = 2, 20, other.get("d", 16)
    make = np.random.default_rng(1)
    windows = other.get("windows", [])
    stacked = ops.parameter([-1, *windows, n, 3 * heads * d], openvino.Type.f32)
    projected = stacked
    if other.get("projected"):
        weights = make.standard_normal((3 * heads * d, 3 * heads * d), dtype=np.float32) / 10
        projected = ops.matmul(stacked, ops.constant(weights), False, False)
    parts = ops.split(projected, ops.constant(2 + len(windows)), 3).outputs()

    def turned(value: Any, order: list[int]) -> Any:
        inner = [place + len(windows) for place in order]
        return ops.transpose(value, ops.constant([*range(1 + len(windows)), *inner]))

    def apart(value: Any, order: list[int]) -> Any:
        shaped = ops.reshape(value, ops.constant([0, *windows, n, heads, d]), special_zero=True)
        return turned(shaped, order)

    learned = ops.constant(np.zeros((1, n, heads * d), np.float32))
    query = apart(learned if other.get("learned") else parts[0], [2, 1, 3])
    key = apart(parts[1], [2, 3, 1])
    if steps := other.get("rotated"):
        query = rotated(query, steps)
        key = turned(rotated(apart(parts[1], [2, 1, 3]), steps), [1, 3, 2])
    value = apart(parts[2], [2, 1, 3])
    if "scale" in other:
        query = ops.multiply(query, ops.constant(np.full(other["scale"], 0.25, np.float32)))
    scores = ops.matmul(query, key, False, False)
    mask = make.standard_normal(other.get("mask", (heads, n, n)), dtype=np.float32) * np.float32(other.get("times", 1))
    scores = ops.multiply(scores, ops.constant(mask))
    if "bias" in other:
        scores = ops.add(scores, ops.constant(make.standard_normal(other["bias"], dtype=np.float32)))
    if other.get("before"):
        scores = ops.relu(scores)
    weights = ops.softmax(scores, other.get("axis", -1))
    product = ops.matmul(weights, value, False, False)
    if other.get("reshaped"):  # another output: tokens and heads in the wrong order
        product = ops.reshape(product, ops.constant([0, n, heads, d]), special_zero=True)
    mixed = turned(product, [2, 1, 3])
    merged = other.get("last", [*windows, n, heads * d])
    last = ops.reshape(mixed, ops.constant([0 if "last" not in other else -1, *merged]), special_zero=True)
    for step in other.get("quantised", ()):
        ends = [ops.constant(np.float32(bound)) for bound in (-128 * step, 127 * step, -128, 127)]
        grid = ops.convert(ops.fake_quantize(last, *ends, 256), "i8")
        last = ops.multiply(ops.convert(grid, "f32"), ops.constant(np.float32(step)))
    outputs = [last, ops.relu(weights)] if other.get("weights_are_used") else [last]
    return openvino.Model([node.output(0) for node in outputs], [stacked], "attention")


def rotated(x: Any, steps: str) -> Any:
    """Return (B, heads, 20, 16) with norm, if ``steps`` names it, and all but the first token rotated."""
    make, end = np.random.default_rng(6), np.iinfo(np.int64).max

    def cut(value: Any, start: int, stop: int, step: int, axis: int) -> Any:
        return ops.slice(value, *(np.array([number]) for number in (start, stop, step, axis)))

    def scaled(value: Any) -> Any:
        return ops.multiply(value, ops.constant(make.standard_normal((19, 16), dtype=np.float32) / 3))

    if "normed" in steps:
        x = ops.mvn(x, np.array([3]), True, 1e-6, "inside_sqrt")
        x = ops.add(ops.multiply(x, ops.constant(make.standard_normal(16, dtype=np.float32))), np.float32(0.5))
    patches = cut(x, 1, end, 1, 2)
    if "pairs" in steps:
        parts = [ops.negative(cut(patches, 1, end, 2, 3)), cut(patches, 0, end, 2, 3)]
        images = 3 if "of three images" in steps else -1
        partner = ops.reshape(ops.concat([ops.unsqueeze(part, [-1]) for part in parts], -1), [images, 2, 19, 16], False)
    elif "halves" in steps:
        partner = ops.concat([ops.negative(cut(patches, 8, 16, 1, 3)), cut(patches, 0, 8, 1, 3)], -1)
    else:  # columns in the opposite order: no rotation
        partner = cut(patches, -1, np.iinfo(np.int64).min, -1, 3)
    return ops.concat([cut(x, 0, 1, 1, 2), ops.add(scaled(patches), scaled(partner))], 2)


@pytest.mark.first(2)
@needs_kernel
@pytest.mark.parametrize(
    ("other", "replaced"),
    [
        ({}, 1),
        ({"mask": ()}, 1),  # a plain attention's scale
        ({"mask": (20, 20)}, 1),  # all heads share the mask
        ({"mask": (1, 20, 20)}, 0),
        ({"d": 8}, 1),
        ({"d": 33, "quantised": [0.02]}, 1),
        ({"quantised": [0.02, 0.04]}, 1),
        ({"bias": (2, 20, 20)}, 1),
        ({"bias": (1, 2, 20, 20), "mask": ()}, 1),
        ({"bias": (3, 2, 20, 20)}, 0),  # a bias for each of three images
        ({"windows": [4]}, 1),
        ({"windows": [4], "mask": (1, 1, 2, 20, 20), "bias": (2, 20, 20)}, 1),
        ({"windows": [4], "bias": (1, 4, 2, 20, 20), "quantised": [0.02]}, 1),
        ({"windows": [4], "mask": (4, 2, 20, 20)}, 0),
        ({"windows": [4], "scale": (), "mask": (), "bias": (4, 2, 20, 20)}, 1),  # of Q alone
        ({"reshaped": True, "last": [20, 32]}, 0),
        ({"scale": (2, 1, 1)}, 1),  # another for each head
        ({"rotated": "pairs"}, 1),
        ({"rotated": "normed, pairs", "quantised": [0.02]}, 1),
        ({"rotated": "normed, halves", "mask": (), "bias": (2, 20, 20)}, 1),
        ({"rotated": "reversed"}, 0),
        ({"rotated": "pairs of three images"}, 0),
        ({"axis": 2}, 0),
        ({"weights_are_used": True}, 0),
    ],
    ids=str,
)
def test_only_masked_attention_is_replaced(other: dict[str, Any], replaced: int) -> None:
    plain, model = graph(**other), graph(**other)
    assert loaded("f32").fuse_attention(model)[0] == replaced
    kinds = [node.get_type_name() for node in model.get_ordered_ops()]
    assert kinds.count("MaskedAttention") == replaced
    assert kinds.count("FakeQuantize") == (1 if "quantised" in other else 0)
    assert ("Softmax" in kinds) == (not replaced)
    assert ("Split" in kinds) == (not replaced)
    batch = np.random.default_rng(2).standard_normal((3, *plain.inputs[0].get_partial_shape().get_max_shape()[1:]))
    settings = {"INFERENCE_PRECISION_HINT": "f32"}
    answers = [
        openvino.compile_model(network, "CPU", settings)(batch.astype(np.float32))[0].copy()
        for network in (plain, model)
    ]
    # A value near the middle of two steps may fall to the other.
    off = np.abs(answers[1] - answers[0])
    assert off.max() <= max(1e-5, 1.01 * max(other.get("quantised", [0])))
    assert np.mean(off > 1e-5) < 0.01


@needs_kernel
@needs_bf16
@pytest.mark.parametrize("quantised", [(), (0.02,)])
def test_with_the_hint_bf16_nothing_is_converted_around_the_attention(quantised: tuple[float, ...]) -> None:
    kernels = loaded("bf16")
    form: dict[str, Any] = {"d": 33, "projected": True}
    if quantised:
        form["quantised"] = (*quantised, *quantised)  # the second keeps OpenVINO's products in int8
    models = {hint: graph(**form) for hint in ("f32", "bf16")}
    for hint, model in models.items():
        assert kernels.fuse_attention(model, hint=hint)[0] == 1  # type: ignore[arg-type]
        (fused,) = [node for node in model.get_ordered_ops() if node.get_type_name() == "MaskedAttention"]
        assert fused.get_input_element_type(0).get_type_name() == hint
        assert fused.get_output_element_type(0).get_type_name() == ("i8" if quantised else hint)
    if quantised:
        return
    batch = np.random.default_rng(2).standard_normal((3, 20, 198), dtype=np.float32) / 4
    compiled = [openvino.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "bf16"}) for model in models.values()]
    # The product's output is bfloat16 in both, and the attention's output is rounded once more, to the same step.
    np.testing.assert_allclose(compiled[1](batch)[0], compiled[0](batch)[0], rtol=2**-7, atol=1e-6)


@needs_kernel
@needs_bf16
def test_a_mask_beyond_float16_is_kept_in_float32() -> None:
    kernels = loaded("bf16")
    for times, arithmetic in ((1, BF16), (2e4, F32)):
        model = graph(times=times)
        assert kernels.fuse_attention(model)[0] == 1
        (fused,) = [node for node in model.get_ordered_ops() if node.get_type_name() == "MaskedAttention"]
        assert fused.get_attributes()["arithmetic"] == arithmetic
    batch = np.random.default_rng(2).standard_normal((3, 20, 96), dtype=np.float32) / 100
    settings = {"INFERENCE_PRECISION_HINT": "f32"}
    answer, truth = (
        openvino.compile_model(network, "CPU", settings)(batch)[0].copy() for network in (model, graph(times=2e4))
    )
    np.testing.assert_allclose(answer, truth, atol=1e-5 * np.abs(batch).max())


# ---- where it is not available ---------------------------------------------------------------------------------


@pytest.fixture
def _anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """On a machine that has compiled nothing yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    compiling.openvino_library.cache_clear()
    yield
    compiling.openvino_library.cache_clear()


@pytest.mark.usefixtures("_anew")
def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, bundle: Bundle, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    library, why = openvino_library()
    assert library is None
    assert why == "no C++ compiler: no-such-compiler is not installed; install g++, or set CXX to another compiler"
    with open_runner("openvino", bundle) as runner:
        assert runner.settings["attention"] == "OpenVINO's"
        assert runner.run(fresh_inputs(bundle, 2)).shape[0] == 2


@pytest.mark.usefixtures("_anew")
def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, no folder")
    library, why = openvino_library()
    assert library is None
    assert str(tmp_path / "cache") in why


def test_a_library_of_another_version(tmp_path: Path) -> None:
    other = tmp_path / "openvino_kernels.so"
    other.write_bytes(b"no library")
    kernels, why = kernels_from(other, "f32")
    assert kernels is None
    assert why.startswith("openvino_kernels.so cannot be loaded:")
