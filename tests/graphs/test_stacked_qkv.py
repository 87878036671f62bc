"""The rewrite of stacked projections: the known form, the same logits bit for bit, other graphs unchanged."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.graphs.constant_folding import fold_constant_moves
from gmmvit_deploy.graphs.proof import constant_nodes
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


def images_for(proto: onnx.ModelProto, count: int = 3) -> np.ndarray:
    shape = [dim.dim_value for dim in proto.graph.input[0].type.tensor_type.shape.dim[1:]]
    return np.random.default_rng(0).standard_normal((count, *shape), dtype=np.float32)


@pytest.mark.first(1)
@pytest.mark.integration
@pytest.mark.parametrize("name", ["vit", "registers", "map_pooling", "swin", "beit", "pit", "eva02", "cait"])
def test_the_rewritten_graph_computes_the_same_logits(name: str) -> None:
    proto = fold_constant_moves(exported(name))
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
    batch: list[int | str] = ["b", 5, 96]
    value = helper.make_tensor_value_info
    node = helper.make_node
    constants = {
        "apart": np.array([-1, 5, 3, 2, 16]),
        "merged": np.array([-1, 5, 32]),
        "scale": np.float32(0.25),
        "w": np.random.default_rng(1).standard_normal((96, 96), dtype=np.float32) / 10,
        "bias": np.random.default_rng(2).standard_normal((max(windows, 1), 2, 5, 5), dtype=np.float32),
    }
    if windows:
        constants |= {"view": np.array([-1, windows, 2, 5, 16]), "flat": np.array([-1, 2, 5, 16])}
    constants |= {f"i{index}": np.asarray(index) for index in range(3)}
    nodes = [
        node("MatMul", ["tensor", "w"], ["x"], name="qkv/MatMul"),
        node("Reshape", ["x", "apart"], ["h"], name="a/Reshape"),
        node("Transpose", ["h"], ["p"], name="a/Transpose", perm=[2, 0, 3, 1, 4]),
        *(node("Gather", ["p", f"i{index}"], [name], name=f"a/{name}", axis=0) for index, name in enumerate("qkv")),
    ]
    names = list("qkv")
    if windows:
        nodes += [node("Reshape", [name, "view"], [f"{name}w"], name=f"a/view.{name}") for name in names]
        names = [f"{name}w" for name in names]
    query, key, content = names
    turn = [0, 1, 2, 4, 3] if windows else [0, 1, 3, 2]
    nodes += [
        node("Transpose", [key], ["kt"], name="a/turn", perm=turn),
        node("MatMul", [query, "kt"], ["s"], name="a/MatMul"),
        node("Mul", ["s", "scale"], ["m"], name="a/Mul"),
        node("Add", ["m", "bias"], ["t"], name="a/Add"),
        node("Softmax", ["t"], ["u"], name="a/Softmax", axis=-1),
        node("MatMul", ["u", content], ["o"], name="a/MatMul.1"),
        *([node("Reshape", ["o", "flat"], ["of"], name="a/flatten")] if windows else []),
        node("Transpose", ["of" if windows else "o"], ["ot"], name="a/merge", perm=[0, 2, 1, 3]),
        node("Reshape", ["ot", "merged"], ["y"], name="a/merged"),
        node("Identity", ["y"], ["logits"], name="last"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [value("tensor", onnx.TensorProto.FLOAT, batch)],
        [value("logits", onnx.TensorProto.FLOAT, ["b", 5, 32])],
        [numpy_helper.from_array(np.asarray(values), name) for name, values in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
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
    node = next(node for node in proto.graph.node if node.name == "a/Transpose")
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
    assert fold_constant_moves(proto) is proto


@pytest.mark.integration
def test_the_table_of_rotary_positions_becomes_constants() -> None:
    proto = exported("eva02")
    assert constant_nodes(proto.graph) == ["model/Split (Split)"]
    folded = fold_constant_moves(proto)
    assert constant_nodes(folded.graph) == []
    onnx.checker.check_model(folded, full_check=True)
    table = next(tensor for tensor in proto.graph.initializer if tensor.name == "network.rope.pos_embed")
    sin, cos = np.split(numpy_helper.to_array(table), 2, axis=1)
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in folded.graph.initializer}
    np.testing.assert_array_equal(stored["split_split_0"], sin)
    np.testing.assert_array_equal(stored["split_split_1"], cos)
    assert table.name not in stored
