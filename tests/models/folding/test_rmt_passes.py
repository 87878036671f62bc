"""RMT stores equal decays of a stage once, and no others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from gmmvit_deploy.checkpoints.weights import bytes_from_model
from gmmvit_deploy.exporting.bundle_from_checkpoint import ExportOptions, bundle_from_checkpoint
from gmmvit_deploy.models.families import model_from_spec
from gmmvit_deploy.models.families.rmt import RMT
from gmmvit_deploy.models.families.rmt.folding import (
    share_decays,
)
from gmmvit_deploy.models.folding.fold import fold
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.scores.attention import attention_scores
from gmmvit_deploy.models.specs import MaskSpec
from gmmvit_deploy.runtimes.runners.open import open_runner
from tests.exact import exact_logits


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
