"""Folding passes of RMT: each pass is exact, reaches its end state, and changes nothing in a second run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from gmmvit_deploy.checkpoints.weights import bytes_from_model
from gmmvit_deploy.export.bundle_from_checkpoint import ExportOptions, bundle_from_checkpoint
from gmmvit_deploy.models.families import model_from_spec
from gmmvit_deploy.models.families.rmt import RMT
from gmmvit_deploy.models.families.rmt.folding import (
    share_decays,
)
from gmmvit_deploy.models.families.rmt.model import (
    DecomposedAttention,
    FoldedRotation,
    ManhattanAttention,
    PairRotation,
)
from gmmvit_deploy.models.folding.fold import fold
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.scores.attention import attention_scores
from gmmvit_deploy.models.specs import MaskSpec
from gmmvit_deploy.runtimes.runners.open import open_runner
from tests.conftest import MANIFEST
from tests.exact import exact_logits
from tests.golden_files import trained

NAMES = tuple(name for name, entry in MANIFEST.items() if entry["family"] == "rmt")
each_file = pytest.mark.parametrize("name", NAMES)


@each_file
def test_decays_are_those_of_the_formula_bit_for_bit(name: str) -> None:
    """The paper authors' code computes |i − j| in float32, then multiplies by the stored decay of each head."""
    model = trained(name)
    folded = {record.layer: record.constant for record in fold(model).biases}
    for path, module in model.named_modules():
        if not isinstance(module, ManhattanAttention):
            continue
        rows, columns = module.grid
        for part in module.attentions():
            decay = part.scores.before.decay.decay
            if isinstance(module, DecomposedAttention):
                index = torch.arange(columns if part is module.rows else rows).to(decay)
                distance, child = (index[:, None] - index[None, :]).abs(), "rows" if part is module.rows else "columns"
            else:
                points = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"))
                points = points.reshape(2, -1).to(decay)
                distance, child = (points[:, :, None] - points[:, None, :]).abs().sum(0), "tokens"
            assert folded.pop(f"{path}.{child}").equal(distance * decay[:, None, None])
    assert not folded


@each_file
def test_rotation_tables_are_those_of_the_formula_bit_for_bit(name: str) -> None:
    model = trained(name)
    folded = fold(model).model
    for path, module in model.named_modules():
        if not isinstance(module, PairRotation):
            continue
        tables = folded.get_submodule(path)
        assert isinstance(tables, FoldedRotation)
        head_dim, (cos, sins) = module.angle.numel(), (table.flatten(0, -2) for table in (tables.cos, tables.sin))
        angles = torch.arange(len(cos), dtype=torch.float32)[:, None] * module.angle[None, :]
        for head in cos.split(head_dim, dim=1):
            assert head.equal(torch.cos(angles).unflatten(1, (-1, 2)).transpose(1, 2).flatten(1))
        sin = torch.sin(angles).unflatten(1, (-1, 2)).transpose(1, 2)
        for head in sins.split(head_dim, dim=1):
            assert head.unflatten(1, (2, -1)).equal(torch.stack((-sin[:, 0], sin[:, 1]), dim=1))


# ---- equal decays --------------------------------------------------------------------------------------------------


def deeper() -> Model:
    """An RMT whose second stage attends to the whole grid of 8×8 tokens in three blocks."""
    spec = replace(RMT.small(MaskSpec(kind="decay")), image_size=64, depths=(1, 3), decomposed_stages=(1,))  # type: ignore[call-arg]
    torch.manual_seed(0)
    return model_from_spec(spec).eval().requires_grad_(False)


WHOLE = [f"stages.1.blocks.{block}.attention.tokens" for block in range(3)]
SHARED = ("stages.0.blocks.0.attention.columns", *WHOLE[1:])


def test_equal_decays_of_a_stage_are_stored_once() -> None:
    folded = fold(deeper())
    assert folded.passes["share_decays"] == SHARED
    scores = dict(attention_scores(folded.model))
    first, *others = (scores[name].before["decay"].get_buffer("constant") for name in WHOLE)
    assert all(other is first for other in others)
    assert share_decays(folded.model) == ()


def test_decays_that_differ_stay_apart() -> None:
    model = deeper()
    dict(attention_scores(model))[WHOLE[1]].before["decay"].get_buffer("decay")[0] *= 2
    assert fold(model).passes["share_decays"] == (SHARED[0], WHOLE[2])


@pytest.mark.nightly
@pytest.mark.integration
def test_the_graph_holds_the_decays_of_a_stage_once_and_the_runners_are_right(tmp_path: Path) -> None:
    model, weights = deeper(), tmp_path / "weights.safetensors"
    weights.write_bytes(bytes_from_model(model))
    bundle = bundle_from_checkpoint(weights, tmp_path / "bundle", ExportOptions(input_kind="tensor", max_batch=4))
    initializers = onnx.load(bundle.onnx_path).graph.initializer
    assert [list(each.dims) for each in initializers].count([2, 64, 64]) == 1
    images = torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(1)).numpy()
    for name in ("onnxruntime", "openvino+kernels"):
        with open_runner(name, bundle) as runner:
            np.testing.assert_allclose(runner.run(images), exact_logits(model, images), rtol=0, atol=1e-5)
