"""The rewrite of stacked projections: the same logits bit for bit, and other graphs unchanged."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.graphs.exported import fold_constants
from gmmvit_deploy.graphs.stacked_qkv import split_stacked_projections
from gmmvit_deploy.graphs.wiring import order_of
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


def test_a_graph_with_nothing_to_rewrite_stays_the_same(tensor_bundles: dict[str, Bundle]) -> None:
    model = ir.load(tensor_bundles["vit_gmm"].onnx_path)
    before = text(model)
    split_stacked_projections(model)
    assert text(model) == before
