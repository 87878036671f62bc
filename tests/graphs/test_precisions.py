"""Casting, quantising and their emulation, on a graph with known numbers."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from gmmvit_deploy.errors import ExportError
from gmmvit_deploy.exporting.onnx_from_model import onnx_from_model
from gmmvit_deploy.graphs.calibration import RANGES, Calibration, ranges_of
from gmmvit_deploy.graphs.cast import cast_graph
from gmmvit_deploy.graphs.emulate import without_bfloat16
from gmmvit_deploy.graphs.folded import prove_folded
from gmmvit_deploy.graphs.masks import changes_of, prove_masks
from gmmvit_deploy.graphs.quantize import activations_of, grid_of, quantize_graph
from gmmvit_deploy.graphs.quantized_faults import form_fault, quantized_faults
from gmmvit_deploy.graphs.roles import roles_of
from gmmvit_deploy.graphs.rounding import compensated_rounding
from gmmvit_deploy.graphs.smoothing import factors_between, smoothed, smoothed_by
from gmmvit_deploy.graphs.wiring import copy_of
from gmmvit_deploy.inference.precision import PRECISIONS, element_type
from gmmvit_deploy.models.folding.fold import FoldedModel, fold
from gmmvit_deploy.models.specs import MaskSpec
from gmmvit_deploy.runtimes.programs.emulated_precision import CountedGraph, emulated_logits
from gmmvit_deploy.runtimes.programs.onnxruntime import calibrate
from tests.graphs import small_graphs
from tests.models.folding.test_passes import small

ONNX_TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}


@pytest.fixture(scope="module")
def folded() -> FoldedModel:
    torch.manual_seed(0)
    return fold(small(MaskSpec(kind="gmm", kernels=2)))


@pytest.fixture(scope="module")
def graph(folded: FoldedModel) -> onnx.ModelProto:
    return onnx_from_model(folded.model, preprocessing=None, max_batch=4)


@pytest.fixture(scope="module")
def images(graph: onnx.ModelProto) -> np.ndarray:
    shape = [dim.dim_value for dim in graph.graph.input[0].type.tensor_type.shape.dim[1:]]
    return np.random.default_rng(0).standard_normal((4, *shape), dtype=np.float32)


def types_of(proto: onnx.ModelProto) -> dict[str, int]:
    """Return tensor → element type, as ONNX itself infers it."""
    inferred = onnx.shape_inference.infer_shapes(proto, strict_mode=True).graph
    types = {value.name: value.type.tensor_type.elem_type for value in (*inferred.value_info, *inferred.output)}
    return types | {value.name: value.data_type for value in inferred.initializer}


@pytest.mark.nightly
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_node_computes_in_the_type_of_the_policy(precision: str, graph: onnx.ModelProto) -> None:
    cast = cast_graph(graph, precision)
    onnx.checker.check_model(cast, full_check=True)
    types, roles = types_of(cast), roles_of(graph.graph)
    checked = 0
    for node in cast.graph.node:
        role = roles.get(node.name)
        if role is not None and role != "shape":
            expected = ONNX_TYPES[element_type(role, precision)]
            floats = [types[name] for name in node.input if types.get(name) in ONNX_TYPES.values()]
            assert {*floats, types[node.output[0]]} == {expected}, node.name
            checked += 1
    assert checked > 20
    assert [value.type.tensor_type.elem_type for value in (*cast.graph.input, *cast.graph.output)] == [
        TensorProto.FLOAT
    ] * 2


def test_a_constant_that_does_not_fit(graph: onnx.ModelProto) -> None:
    large = copy_of(graph)
    weights = next(tensor for tensor in large.graph.initializer if tensor.name.endswith("mask.constant"))
    weights.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weights) + np.float32(1e5), weights.name))
    with pytest.raises(ExportError, match=r"mask.constant: the largest value, 1e\+05, exceeds the range of float16"):
        cast_graph(large, "fp16")
    cast_graph(large, "bf16")  # which has float32's range


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_minus_infinity_in_a_constant_stays(precision: str, graph: onnx.ModelProto) -> None:
    """Minus infinity masks entries of the scores, and every type of a mask or bias can represent it."""
    masked = copy_of(graph)
    weights = next(tensor for tensor in masked.graph.initializer if tensor.name.endswith("mask.constant"))
    values = numpy_helper.to_array(weights).copy()
    values[..., 0, 0] = -np.inf
    weights.CopyFrom(numpy_helper.from_array(values, weights.name))
    cast = cast_graph(masked, precision)
    (stored,) = [tensor for tensor in cast.graph.initializer if tensor.name.startswith(weights.name)]
    infinite = np.isinf(numpy_helper.to_array(stored).astype(np.float32))
    np.testing.assert_array_equal(infinite, np.isinf(values))
    values[..., 1, 1] = np.inf
    weights.CopyFrom(numpy_helper.from_array(values, weights.name))
    with pytest.raises(ExportError, match="the largest value, inf, exceeds the range"):
        cast_graph(masked, precision)


def test_bfloat16_is_emulated_with_every_rounding() -> None:
    """Y = (x + 1) · 3, each step rounded to bfloat16, against ml_dtypes."""
    unit, triple = (np.array(number, ml_dtypes.bfloat16) for number in (1.0, 3.0))
    proto = small_graphs.graph(
        "b = Cast<to = 16>(x)  s = Add(b, one)  m = Mul(s, three)  y = Cast<to = 1>(m)",
        x="n, 1",
        one=unit,
        three=triple,
    )
    x = np.random.default_rng(0).standard_normal((50, 1), dtype=np.float32)
    expected = ((x.astype(ml_dtypes.bfloat16) + unit) * triple).astype(np.float32)
    assert emulated_logits(proto, x, name="x").tobytes() == expected.tobytes()
    emulated = without_bfloat16(proto)
    assert {node.op_type for node in emulated.graph.node if node.name in ("s", "m")} == {"Add", "Mul"}
    assert all(types_of(emulated)[name] == TensorProto.FLOAT for name in ("s", "m"))


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_projections_are_quantised_and_nothing_else(precision: str, graph: onnx.ModelProto, images: np.ndarray) -> None:
    calibration = calibrate(graph, [images])
    quantized = quantize_graph(graph, precision, ranges_of(calibration, "extremes"))
    onnx.checker.check_model(quantized, full_check=True)
    roles = roles_of(quantized.graph)
    maker = {name: node for node in quantized.graph.node for name in node.output}
    for node in quantized.graph.node:
        fed = [maker[name].op_type for name in node.input if name in maker and node.op_type in ("MatMul", "Gemm")]
        if roles[node.name] == "projection":
            assert fed == ["DequantizeLinear"] * 2, node.name
        elif node.op_type in ("MatMul", "Gemm"):
            assert "DequantizeLinear" not in fed, node.name
    zeros = [tensor for tensor in quantized.graph.initializer if tensor.name.endswith(".zero")]
    assert zeros
    assert not any(numpy_helper.to_array(tensor).astype(np.float32).any() for tensor in zeros)  # symmetric
    expected = emulated_logits(graph, images, name="x")
    distance = np.abs(emulated_logits(quantized, images, name="x") - expected).max() / np.abs(expected).max()
    assert 0 < distance < 0.1


def test_calibration_sees_what_goes_into_each_projection(graph: onnx.ModelProto, images: np.ndarray) -> None:
    calibration = calibrate(graph, [images[:3], images[3:]], moments=True)
    assert calibration.images == 4
    probed = copy_of(graph)
    name = activations_of(graph.graph)[0]
    probed.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    session = onnxruntime.InferenceSession(probed.SerializeToString(), providers=["CPUExecutionProvider"])
    (values,) = session.run([name], {"tensor": images})
    observed = calibration.observed[name]
    assert observed.lows == pytest.approx(values.reshape(4, -1).min(1), rel=1e-5)
    assert observed.highs == pytest.approx(values.reshape(4, -1).max(1), rel=1e-5)
    assert observed.counts.sum() == values.size
    rows = values.reshape(-1, values.shape[-1]).astype(float)
    np.testing.assert_allclose(observed.channels, np.abs(rows).max(0), rtol=1e-5)
    np.testing.assert_allclose(observed.moments, rows.T @ rows, rtol=1e-4, atol=1e-4)


def test_the_range_with_the_least_error_cuts_an_outlier() -> None:
    """For a million unit normals and a single value of 100, clipping the 100 is better than steps of 100/127."""
    calibration = Calibration()
    values = np.append(np.random.default_rng(0).standard_normal(1_000_000), 100.0).astype(np.float32)
    calibration.add("x", values[None])
    ranges = {rule: ranges_of(calibration, rule)["x"] for rule in RANGES}

    def error(largest: float) -> float:
        grid = grid_of("int8")
        scale = np.float32(largest / 127)
        return float(((grid.quantized(values, scale) * scale - values) ** 2).mean())

    assert ranges["extremes"] == ranges["mean extremes"] == (values.min(), 100.0)
    assert ranges["least error"][1] < 60
    assert error(ranges["least error"][1]) < error(100.0)
    assert ranges["percentile"][1] < 6


def test_compensated_rounding_keeps_the_outputs_better_than_rounding_to_nearest() -> None:
    random = np.random.default_rng(0)
    inputs = random.standard_normal((4000, 16)) @ random.standard_normal((16, 64))  # correlated, as activations are
    weight = random.standard_normal((32, 64))
    scales = np.abs(weight).max(1) / 127
    nearest = np.rint(weight / scales[:, None])
    rounded = compensated_rounding(weight, inputs.T @ inputs, scales, largest=127)
    assert (rounded == np.rint(rounded)).all()
    assert np.abs(rounded).max() <= 127
    errors = [(((integers * scales[:, None] - weight) @ inputs.T) ** 2).mean() for integers in (rounded, nearest)]
    assert errors[0] < errors[1] / 2
    dead = inputs * (np.arange(64) > 3)  # channels that are always 0, as after ReLU
    assert np.isfinite(compensated_rounding(weight, dead.T @ dead, scales, largest=127)).all()


def test_smoothing_changes_no_bit_of_the_logits(graph: onnx.ModelProto, images: np.ndarray) -> None:
    calibration = calibrate(graph, [images])
    measured = {name: observed.channels for name, observed in calibration.observed.items()}
    uneven = {name: channels * 4.0 ** (np.arange(len(channels)) % 5) for name, channels in measured.items()}
    smooth, factors = smoothed(graph, uneven, 0.5)
    assert factors
    assert all((np.exp2(np.rint(np.log2(factor))) == factor).all() for factor in factors.values())
    assert any(np.ptp(factor) > 0 for factor in factors.values())
    expected = emulated_logits(graph, images, name="x")
    assert emulated_logits(smooth, images, name="x").tobytes() == expected.tobytes()
    again = calibrate(smooth, [images])
    ranges = ranges_of(again, "extremes")
    quantized = quantize_graph(smooth, "int8", ranges, zero_points=True)

    def faults(stored: onnx.ModelProto) -> tuple[str, ...]:
        read = smoothed_by(graph, factors_between(graph.graph, stored.graph))
        again = quantize_graph(read, "int8", ranges, zero_points=True)
        assert not form_fault(stored, again)
        return quantized_faults(stored, again, compensated=False)

    assert not faults(quantized)
    forgotten = copy_of(quantized)
    norm = next(node for node in forgotten.graph.node if node.op_type == "LayerNormalization")
    for tensor in forgotten.graph.initializer:
        if tensor.name in norm.input[1:]:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) / np.float32(2), tensor.name))
    assert faults(forgotten)  # the weights do not have the factor 2
    counted = CountedGraph(quantized, name="x")
    expected = emulated_logits(quantized, images, name="x")
    assert counted.logits(images, np.ones(len(images), bool)).tobytes() == expected.tobytes()
    assert max(counted.saturated().values()) < 0.01
    for name, factor in factors.items():
        np.testing.assert_allclose(again.observed[name].channels * factor, measured[name], rtol=1e-5)


def test_the_report_of_a_mask_that_half_precision_hurts(folded: FoldedModel) -> None:
    mask = folded.masks[0]
    hurt = mask.constant.clone()
    hurt[0, 0, 0], hurt[0, 0, 1], hurt[0, 0, 2] = 1e-9, 3e-6, 1e6
    first, *others = changes_of([replace(mask, constant=hurt)], "fp16")
    assert (first.layer, first.head) == (mask.layer, 0)
    assert first.entries == hurt[0].numel()
    assert (first.flushed, first.saturated) == (1, 1)
    assert first.subnormal == 1
    assert first.relative_change < 0.02  # of the subnormal entry; the other entries keep 11 bits
    assert all(other.flushed == other.saturated == 0 and other.relative_change < 2**-11 for other in others)
    unhurt = next(changes_of([replace(mask, constant=hurt)], "bf16"))
    assert (unhurt.flushed, unhurt.saturated, unhurt.subnormal) == (0, 0, 0)
    assert next(changes_of([mask], "fp32")).largest_change == 0


def test_masks_are_proven_in_the_cast_graph(folded: FoldedModel, graph: onnx.ModelProto) -> None:
    records, _ = prove_folded(graph, folded.masks, folded.biases)
    cast = cast_graph(graph, "fp16")
    names, hashes = prove_masks(cast, folded.masks, records, "fp16")
    assert list(names) == list(hashes) == [mask.layer for mask in folded.masks]
    stored = next(tensor for tensor in cast.graph.initializer if tensor.name == names[folded.masks[0].layer])
    changed = numpy_helper.to_array(stored).copy()
    changed.flat[1] += 1
    stored.CopyFrom(numpy_helper.from_array(changed, stored.name))
    with pytest.raises(ExportError, match="does not contain the folded mask of this layer in float16"):
        prove_masks(cast, folded.masks, records, "fp16")
