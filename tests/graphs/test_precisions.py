"""Casting, quantising and their emulation, on a graph with known numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from gmmvit_deploy.errors import ExportError
from gmmvit_deploy.exporting.onnx_from_model import onnx_from_model
from gmmvit_deploy.graphs.calibration import extremes_of_divided, ranges_of
from gmmvit_deploy.graphs.cast import cast_graph
from gmmvit_deploy.graphs.emulate import without_bfloat16
from gmmvit_deploy.graphs.folded import prove_folded
from gmmvit_deploy.graphs.masks import changes_of, prove_masks
from gmmvit_deploy.graphs.quantize import quantize_graph
from gmmvit_deploy.graphs.quantized_faults import form_fault, quantized_faults
from gmmvit_deploy.graphs.roles import roles_of
from gmmvit_deploy.graphs.smoothing import factors_between, smoothed, smoothed_by
from gmmvit_deploy.graphs.wiring import made_by
from gmmvit_deploy.models.folding.fold import FoldedModel, fold
from gmmvit_deploy.models.specs import MaskSpec
from gmmvit_deploy.runtimes.programs.emulated_precision import CountedGraph, emulated_logits
from gmmvit_deploy.runtimes.programs.onnxruntime import calibrate
from tests.graphs import small_graphs
from tests.models.folding.test_passes import small


@pytest.fixture(scope="module")
def folded() -> FoldedModel:
    torch.manual_seed(0)
    return fold(small(MaskSpec(kind="gmm", kernels=2)))


@pytest.fixture(scope="module")
def graph(folded: FoldedModel) -> ir.Model:
    return onnx_from_model(folded.model, preprocessing=None, max_batch=4)


@pytest.fixture(scope="module")
def images(graph: ir.Model) -> np.ndarray:
    shape = graph.graph.inputs[0].shape[1:]
    return np.random.default_rng(0).standard_normal((4, *shape), dtype=np.float32)


def types_of(model: ir.Model) -> dict[str, ir.DataType]:
    """Return tensor → element type, as ONNX itself infers it."""
    proto = ir.to_proto(model)
    del proto.graph.value_info[:]
    graph = ir.from_proto(onnx.shape_inference.infer_shapes(proto, strict_mode=True)).graph
    values = [*graph.initializers.values(), *(value for node in graph for value in node.outputs)]
    return {value.name: value.dtype for value in values}


def with_mask(graph: ir.Model, change: Callable[[np.ndarray], None]) -> tuple[ir.Model, np.ndarray]:
    """Return a copy of the graph in which a mask is changed, and the mask."""
    changed = graph.clone()
    name = next(name for name in changed.graph.initializers if name.endswith("mask.constant"))
    values = small_graphs.stored(graph)[name].copy()
    change(values)
    changed.graph.initializers[name].const_value = ir.tensor(values, name=name)
    return changed, values


def test_a_constant_that_does_not_fit(graph: ir.Model) -> None:
    large, _ = with_mask(graph, lambda mask: mask.__iadd__(np.float32(1e5)))
    with pytest.raises(ExportError, match=r"mask.constant: the largest value, 1e\+05, exceeds the range of float16"):
        cast_graph(large, "fp16")
    cast_graph(large, "bf16")  # which has float32's range


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_minus_infinity_in_a_constant_stays(precision: str, graph: ir.Model) -> None:
    """Minus infinity masks entries of the scores, and every type of a mask or bias can represent it."""
    masked, values = with_mask(graph, lambda mask: mask[..., 0, 0].fill(-np.inf))
    masks = [
        mask for name, mask in small_graphs.stored(cast_graph(masked, precision)).items() if "mask.constant" in name
    ]
    infinite = [np.isinf(mask.astype(np.float32)) for mask in masks]
    assert any(np.array_equal(one, np.isinf(values)) for one in infinite)
    masked, _ = with_mask(masked, lambda mask: mask[..., 1, 1].fill(np.inf))
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
    assert {node.op_type for node in emulated.graph if node.name in ("s", "m")} == {"Add", "Mul"}
    assert all(types_of(emulated)[name] == ir.DataType.FLOAT for name in ("s", "m"))


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_projections_are_quantised_and_nothing_else(precision: str, graph: ir.Model, images: np.ndarray) -> None:
    calibration = calibrate(graph, [images])
    quantized = quantize_graph(graph, precision, ranges_of(calibration, "extremes"))
    onnx.checker.check_model(ir.to_proto(quantized), full_check=True)
    for node, role in roles_of(quantized.graph).items():
        fed = [made_by(value, "DequantizeLinear") is not None for value in node.inputs[:2]]
        if role == "projection":
            assert all(fed), node.name
        elif node.op_type in ("MatMul", "Gemm"):
            assert not any(fed), node.name
    zeros = [values for name, values in small_graphs.stored(quantized).items() if name.endswith(".zero")]
    assert zeros
    assert not any(values.astype(np.float32).any() for values in zeros)  # symmetric
    expected = emulated_logits(graph, images, name="x")
    distance = np.abs(emulated_logits(quantized, images, name="x") - expected).max() / np.abs(expected).max()
    assert 0 < distance < 0.1


def test_smoothing_changes_no_bit_of_the_logits(graph: ir.Model, images: np.ndarray) -> None:
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
    derived = extremes_of_divided(calibration, factors)
    np.testing.assert_allclose([derived[name] for name in ranges], list(ranges.values()), rtol=1e-5)
    quantized = quantize_graph(smooth, "int8", ranges, zero_points=True)

    def faults(stored: ir.Model) -> tuple[str, ...]:
        read = smoothed_by(graph, factors_between(graph.graph, stored.graph))
        again = quantize_graph(read, "int8", ranges, zero_points=True)
        assert not form_fault(stored.graph, again.graph)
        return quantized_faults(stored.graph, again.graph, compensated=False)

    assert not faults(quantized)
    forgotten = quantized.clone()
    norm = next(node for node in forgotten.graph if node.op_type == "LayerNormalization")
    for value in norm.inputs[1:]:
        value.const_value = ir.tensor(value.const_value.numpy() / np.float32(2), name=value.name)
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


def test_masks_are_proven_in_the_cast_graph(folded: FoldedModel, graph: ir.Model) -> None:
    records, _ = prove_folded(graph.graph, folded.masks, folded.biases)
    cast = cast_graph(graph, "fp16")
    names, hashes = prove_masks(cast.graph, folded.masks, records, "fp16")
    assert list(names) == list(hashes) == [mask.layer for mask in folded.masks]
    stored = cast.graph.initializers[names[folded.masks[0].layer]]
    changed = stored.const_value.numpy().copy()
    changed.flat[1] += 1
    stored.const_value = ir.tensor(changed, name=stored.name)
    with pytest.raises(ExportError, match="does not contain the folded mask of this layer in float16"):
        prove_masks(cast.graph, folded.masks, records, "fp16")
