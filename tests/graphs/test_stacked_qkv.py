"""The rewrite of stacked projections: the known form, the same logits bit for bit, other graphs unchanged."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.graphs.exported import fold_constants
from gmmvit_deploy.graphs.stacked_qkv import split_stacked_projections
from gmmvit_deploy.inference.matcher import MatchedAttention, attentions_in_onnx
from tests.timm_graphs import exported


def logits(proto: onnx.ModelProto, images: np.ndarray) -> np.ndarray:
    """Run the graph in ONNX Runtime without its optimisations, which depend on the form of the graph."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    result: np.ndarray = onnxruntime.InferenceSession(proto.SerializeToString(), options).run(None, {"tensor": images})[
        0
    ]
    return result


def folded(proto: onnx.ModelProto) -> onnx.ModelProto:
    model = ir.from_proto(proto)
    fold_constants(model)
    return ir.to_proto(model)


def images_for(proto: onnx.ModelProto, count: int = 3) -> np.ndarray:
    shape = [dim.dim_value for dim in proto.graph.input[0].type.tensor_type.shape.dim[1:]]
    return np.random.default_rng(0).standard_normal((count, *shape), dtype=np.float32)


@pytest.mark.first(1)
@pytest.mark.integration
@pytest.mark.parametrize("name", ["vit", "registers", "map_pooling", "swin", "beit", "pit", "eva02", "cait"])
def test_the_rewritten_graph_computes_the_same_logits(name: str) -> None:
    proto = folded(exported(name))
    rewritten = split_stacked_projections(proto)
    onnx.checker.check_model(rewritten, full_check=True)
    assert rewritten is not proto
    images = images_for(proto)
    np.testing.assert_array_equal(logits(rewritten, images), logits(proto, images))
    assert len({node.name for node in rewritten.graph.node}) == len(rewritten.graph.node)
    orders = [list(a.ints) for node in rewritten.graph.node for a in node.attribute if a.name == "perm"]
    assert [2, 0, 3, 1, 4] not in orders
    assert split_stacked_projections(rewritten) is rewritten


def stacked(windows: int = 0) -> onnx.ModelProto:
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
    return onnx.shape_inference.infer_shapes(model, strict_mode=True)


@pytest.mark.parametrize("windows", [0, 4])
def test_gathers_and_windows(windows: int) -> None:
    proto = stacked(windows)
    rewritten = split_stacked_projections(proto)
    onnx.checker.check_model(rewritten, full_check=True)
    images = images_for(proto, count=8)
    np.testing.assert_array_equal(logits(rewritten, images), logits(proto, images))
    (match,) = attentions_in_onnx(rewritten.SerializeToString())
    assert isinstance(match, MatchedAttention), match
    assert (match.heads, match.tokens, match.head_dim) == (2, 5, 16)
    assert match.windows == ((windows,) if windows else ())
    assert [part.column for part in match.parts] == [0, 32, 64]


def _other_order(proto: onnx.ModelProto) -> None:
    node = next(node for node in proto.graph.node if node.name == "a/p")
    node.attribute[0].ints[:] = [2, 0, 3, 1, 4][::-1]


def _second_reader(proto: onnx.ModelProto) -> None:
    proto.graph.node.append(helper.make_node("Identity", ["p"], ["again"], name="again"))


def _no_shapes(proto: onnx.ModelProto) -> None:
    del proto.graph.value_info[:]


@pytest.mark.parametrize("change", [_other_order, _second_reader, _no_shapes])
def test_other_graphs_are_left_alone(change: Callable[[onnx.ModelProto], None]) -> None:
    proto = stacked()
    change(proto)
    assert split_stacked_projections(proto) is proto


def test_a_graph_with_nothing_to_rewrite_is_returned(tensor_bundles: dict[str, Bundle]) -> None:
    proto = onnx.load(tensor_bundles["vit_gmm"].onnx_path)
    assert split_stacked_projections(proto) is proto
