"""Rewrites of stacked projections and merged tokens: the logits of the formula, and other graphs unchanged."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import Tensor

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.exporting.graphs_of_precisions import graph_from_model
from gmmvit_deploy.graphs.exported import fold_constants
from gmmvit_deploy.graphs.merged_tokens import why_not_merged, with_merged_tokens
from gmmvit_deploy.graphs.stacked_qkv import split_stacked_projections
from gmmvit_deploy.graphs.wiring import order_of
from gmmvit_deploy.models.families.timm.model import TimmModel
from tests.graphs.small_graphs import run
from tests.models.families.small_models import random_images
from tests.timm_graphs import exported, timm_model


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


# ---- merged tokens ---------------------------------------------------------------------------------------------------


PATCHES = 196


def graph_of(model: TimmModel) -> ir.Model:
    return graph_from_model(model, "fp32", preprocessing=None, max_batch=4).model


def merged(tokens: Tensor, counts: Tensor, merge: int) -> tuple[Tensor, Tensor]:
    """Merge the tokens of the patches of one image (P, C), pair by pair."""
    a, b, a_counts, b_counts = tokens[::2], tokens[1::2], counts[::2], counts[1::2]
    cosines = torch.nn.functional.cosine_similarity(a[:, None], b[None], dim=-1)
    order = cosines.max(1).values.argsort(descending=True).tolist()
    sums, sizes = b * b_counts[:, None], b_counts.clone()
    for source in order[:merge]:
        target = int(cosines[source].argmax())
        sums[target] += a[source] * a_counts[source]
        sizes[target] += a_counts[source]
    kept = order[merge:]
    return torch.cat([a[kept], sums / sizes[:, None]]), torch.cat([a_counts[kept], sizes])


def counted(block: Any, tokens: Tensor, counts: Tensor) -> Tensor:
    """Run a block whose attention counts each patch of a token: with as many copies of its key and value."""
    before = tokens.shape[1] - len(counts)
    repeats = torch.cat([torch.ones(before), counts]).long()
    attention, heads = block.attn, block.attn.num_heads
    q, k, v = attention.qkv(block.norm1(tokens)).chunk(3, -1)
    q, k, v = (t[0].unflatten(-1, (heads, -1)).transpose(0, 1) for t in (q, k, v))
    k, v = (t.repeat_interleave(repeats, 1) for t in (k, v))
    mixed = ((q @ k.transpose(1, 2) * q.shape[-1] ** -0.5).softmax(-1) @ v).transpose(0, 1).flatten(1)[None]
    tokens = tokens + block.ls1(attention.proj(mixed))
    return tokens + block.ls2(block.mlp(block.norm2(tokens)))


@torch.no_grad()
def expected_logits(model: TimmModel, images: Tensor) -> Tensor:
    network = model.network
    rows = []
    for image in images.double().split(1):
        tokens = network.norm_pre(network._pos_embed(network.patch_embed(image)))
        before = tokens.shape[1] - PATCHES
        counts = torch.ones(PATCHES, dtype=torch.float64)
        for number, block in enumerate(network.blocks, 1):
            tokens = counted(block, tokens, counts)
            if number in (1, 2):  # of four blocks
                patches, counts = merged(tokens[0, before:], counts, PATCHES // 4)
                tokens = torch.cat([tokens[:, :before], patches[None]], 1)
        if network.global_pool == "map":  # an attention, which counts patches too
            tokens = tokens.repeat_interleave(counts.long(), 1)
        rows.append(network.forward_head(network.norm(tokens)))
    return torch.cat(rows)


@pytest.mark.integration
@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["196_patches", "196_patches_registers", "196_patches_map_pooling"])
def test_the_graph_merges_as_the_formula_says(name: str) -> None:
    model = timm_model(name)
    graph = with_merged_tokens(graph_of(model))
    onnx.checker.check_model(ir.to_proto(graph), full_check=True)
    images = random_images(model.spec)
    logits = run(graph, images)
    exact = expected_logits(copy.deepcopy(model).double(), torch.from_numpy(images)).numpy()
    assert abs(logits - exact).max() <= 1e-5 * abs(exact).max()
    alone = run(graph, images[:1])
    assert abs(alone - logits[:1]).max() <= 1e-6 * abs(exact).max()  # neighbours of an image do not change its answer


@pytest.mark.integration
@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("swin", "score_bias"),
        ("64_patches", "64 patches are few"),
        ("eva02", "rotation"),
        ("resnet", "unknown"),
        ("convnext", "depthwise"),
    ],
)
def test_networks_whose_tokens_are_not_merged(name: str, why: str) -> None:
    assert why in why_not_merged(graph_of(timm_model(name)).graph)
