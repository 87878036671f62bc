"""The rewrite of stacked projections: the known form, the same logits bit for bit, other graphs unchanged."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.graphs.exported import fold_constants
from gmmvit_deploy.graphs.stacked_qkv import split_stacked_projections
from gmmvit_deploy.graphs.wiring import order_of
from gmmvit_deploy.inference.matcher import MatchedAttention, attentions_in_onnx
from tests.graphs.small_graphs import run
from tests.timm_graphs import exported


def folded(model: ir.Model) -> ir.Model:
    fold_constants(model)
    return model


def images_for(model: ir.Model, count: int = 3) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((count, *model.graph.inputs[0].shape[1:]), dtype=np.float32)


def rewritten(model: ir.Model) -> ir.Model:
    short = model.clone()
    split_stacked_projections(short)
    onnx.checker.check_model(ir.to_proto(short), full_check=True)
    return short


def text(model: ir.Model) -> str:
    return str(ir.to_proto(model))


@pytest.mark.first(1)
@pytest.mark.integration
@pytest.mark.parametrize("name", ["vit", "registers", "map_pooling", "swin", "beit", "pit", "eva02", "cait"])
def test_the_rewritten_graph_computes_the_same_logits(name: str) -> None:
    model = folded(exported(name))
    short = rewritten(model)
    images = images_for(model)
    np.testing.assert_array_equal(run(short, images, exact=True), run(model, images, exact=True))
    assert len({node.name for node in short.graph}) == len(short.graph)
    assert [2, 0, 3, 1, 4] in [order_of(node) for node in model.graph]
    assert [2, 0, 3, 1, 4] not in [order_of(node) for node in short.graph]
    assert text(rewritten(short)) == text(short)


def stacked(windows: int = 0) -> ir.Model:
    """Attention with n = 5, H = 2, d = 16 as timm computes Q, K and V; with windows, views them as (B / w, w, …)."""
    q, k, v, o = ("qw", "kw", "vw", "of") if windows else tuple("qkvo")
    views = "qw = Reshape(q, view)  kw = Reshape(k, view)  vw = Reshape(v, view)" if windows else ""
    body = f"""
        x = MatMul(tensor, w)
        h = Reshape(x, apart)
        p = Transpose<perm = [2, 0, 3, 1, 4]>(h)
        q = Gather<axis = 0>(p, i0)  k = Gather<axis = 0>(p, i1)  v = Gather<axis = 0>(p, i2)
        {views}
        kt = Transpose<perm = {[0, 1, 2, 4, 3] if windows else [0, 1, 3, 2]}>({k})
        s = MatMul({q}, kt)  m = Mul(s, scale)  t = Add(m, bias)
        u = Softmax<axis = -1>(t)
        o = MatMul(u, {v})
        {"of = Reshape(o, flat)" if windows else ""}
        ot = Transpose<perm = [0, 2, 1, 3]>({o})
        y = Reshape(ot, merged)
        logits = Identity(y)
    """
    random = np.random.default_rng(1)
    constants = {
        "apart": np.array([-1, 5, 3, 2, 16]),
        "view": np.array([-1, windows, 2, 5, 16]),
        "flat": np.array([-1, 2, 5, 16]),
        "merged": np.array([-1, 5, 32]),
        "scale": np.array(0.25, np.float32),
        "w": random.standard_normal((96, 96), dtype=np.float32) / 10,
        "bias": random.standard_normal((max(windows, 1), 2, 5, 5), dtype=np.float32),
        **{f"i{index}": np.asarray(index) for index in range(3)},
    }
    head = '<ir_version: 10, opset_import: ["": 20]> g (float[b, 5, 96] tensor) => (float[b, 5, 32] logits)'
    model = onnx.parser.parse_model(f"{head} {{ {body} }}")
    model.graph.initializer.extend(numpy_helper.from_array(values, name) for name, values in constants.items())
    for node in model.graph.node:
        node.name = f"a/{node.output[0]}"
    return ir.from_proto(onnx.shape_inference.infer_shapes(model, strict_mode=True))


@pytest.mark.parametrize("windows", [0, 4])
def test_gathers_and_windows(windows: int) -> None:
    model = stacked(windows)
    short, images = rewritten(model), images_for(model, count=8)
    np.testing.assert_array_equal(run(short, images, exact=True), run(model, images, exact=True))
    (match,) = attentions_in_onnx(ir.to_proto(short).SerializeToString())
    assert isinstance(match, MatchedAttention), match
    assert (match.heads, match.tokens, match.head_dim) == (2, 5, 16)
    assert match.windows == ((windows,) if windows else ())
    assert [part.column for part in match.parts] == [0, 32, 64]


def _other_order(model: ir.Model) -> None:
    model.graph.node("a/p").attributes["perm"] = ir.AttrInt64s("perm", [4, 1, 3, 0, 2])


def _second_reader(model: ir.Model) -> None:
    (p,) = model.graph.node("a/p").outputs
    again = ir.node("Identity", [p], outputs=[ir.Value(name="again")], name="again")
    model.graph.append(again)
    model.graph.outputs.extend(again.outputs)


def _no_shapes(model: ir.Model) -> None:
    for node in model.graph:
        node.outputs[0].shape = None


@pytest.mark.parametrize("change", [_other_order, _second_reader, _no_shapes])
def test_other_graphs_are_left_alone(change: Callable[[ir.Model], None]) -> None:
    model = stacked()
    change(model)
    before = text(model)
    split_stacked_projections(model)
    assert text(model) == before


def test_a_graph_with_nothing_to_rewrite_stays_the_same(tensor_bundles: dict[str, Bundle]) -> None:
    model = ir.load(tensor_bundles["vit_gmm"].onnx_path)
    before = text(model)
    split_stacked_projections(model)
    assert text(model) == before
