"""Shifted patches (SPT) and local attention (LSA): the golden files of the released code, and folding."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.errors import CheckpointError, SpecError
from gmmvit_deploy.exporting.bundle_from_checkpoint import bundle_from_checkpoint
from gmmvit_deploy.models.families import FAMILIES
from gmmvit_deploy.models.families.cait.folding import drop_remainder
from gmmvit_deploy.models.families.t2t.model import T2T
from gmmvit_deploy.models.families.t2t.spec import T2TSpec
from gmmvit_deploy.models.folding.fold import folding_passes
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.scores.attention import attention_scores
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.runtimes.runners.onnxruntime import OnnxRuntimeRunner
from tests.conftest import cifar_options, golden
from tests.exact import assert_same_logits, exact_logits
from tests.golden_files import tensors_of

Tensors = dict[str, Tensor]


def trained(name: str) -> Model:
    return load_checkpoint(golden(name).path).model


# ---- folding -------------------------------------------------------------------------------------------------------


LARGE = "patch_blocks.1.attention.inner"
LARGE_MIXING = 1e3
"""Each entry of the head mixing before softmax, so that the −1e-9 becomes −1e-6 for each head that is mixed."""


@pytest.fixture(scope="module")
def with_large_remainder() -> Model:
    """Return a CaiT with small scores and a large head mixing in an attention, so that the −1e-9 changes the logits."""
    model = trained("sl_cait")
    before: Any = model.get_submodule(LARGE).scores.before
    with torch.no_grad():
        before["temperature"].temperature.div_(LARGE_MIXING)
        before["mixing"].weight.fill_(LARGE_MIXING)
    return model


def test_a_large_remainder_moves_behind_the_head_mixing(with_large_remainder: Model) -> None:
    model, images = copy.deepcopy(with_large_remainder).double(), golden("sl_cait").inputs
    expected = exact_logits(model, images)
    for run in folding_passes(model.spec):
        changed = run(model)
        if run is drop_remainder:
            assert len(changed) == 3
            assert run(model) == ()
        assert_same_logits(exact_logits(model, images), expected, run.__name__, atol=1e-11)
    kept = {name: [step_name for step_name, _ in scores.steps_before()] for name, scores in attention_scores(model)}
    assert kept.pop(LARGE) == ["before.diagonal", "before.mixing", "before.remainder"]
    assert not any("before.remainder" in steps for steps in kept.values())
    inner: Any = model.get_submodule(LARGE)
    bias: Tensor = dict(inner.scores.steps())["before.remainder"].matrix()
    heads, tokens, _ = bias.shape
    diagonal = torch.full((heads, tokens), -1e-9 * heads * LARGE_MIXING, dtype=torch.float64)
    torch.testing.assert_close(bias, torch.diag_embed(diagonal), rtol=1e-7, atol=0)
    inner.scores.put("before.remainder", None)
    assert np.abs(exact_logits(model, images) - expected).max() > 1e-9  # the bias is no rounding error


# ---- shifted patches -----------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.integration
def test_a_graph_that_takes_pixels_pads_after_the_normalisation(tmp_path: Path) -> None:
    """Black pixels are not zeros after the normalisation, so that zeros around black pixels show the order."""
    bundle = bundle_from_checkpoint(golden("sl_vit").path, tmp_path / "bundle", cifar_options())
    pixels = np.zeros((2, 32, 32, 3), dtype=np.uint8)
    pixels[1, 8:24] = 255
    images = bundle.manifest.image.tensor_from_pixels(pixels)
    with OnnxRuntimeRunner(bundle) as runner:
        np.testing.assert_allclose(runner.run(pixels), exact_logits(trained("sl_vit"), images), rtol=0, atol=2e-5)


# ---- T2T -----------------------------------------------------------------------------------------------------------


def small_t2t(**changes: Any) -> T2TSpec:
    spec = next(family for family in FAMILIES if family.name == "t2t").variants()["class-token"]
    assert isinstance(spec, T2TSpec)
    return replace(spec, **changes)


def test_a_single_head_of_t2t_adds_v_in_place_of_the_normed_input() -> None:
    torch.manual_seed(0)
    model = T2T(small_t2t(heads=1, head_dim=32)).eval()
    block, x = model.blocks[0], torch.randn(2, 17, 32)
    with torch.inference_mode():
        query, key, value = block.attention.qkv(block.attention_norm(x)).chunk(3, dim=-1)
        mixed = torch.softmax(query @ key.transpose(1, 2) * 32**-0.5, dim=-1) @ value
        x1 = x + (block.attention.out(mixed) + value)
        torch.testing.assert_close(block(x), x1 + block.mlp(block.mlp_norm(x1)))
    with pytest.raises(SpecError, match="head_dim must be dim: expected 32, got 8"):
        small_t2t(heads=1, head_dim=8)


def test_a_plain_t2t_with_a_position_for_its_class_token_reads_the_class_token(tmp_path: Path) -> None:
    state = tensors_of("sl_t2t")
    plain = {name: tensor for name, tensor in state.items() if not name.endswith(".scale")}
    torch.save(plain, tmp_path / "t2t.pth")
    spec: Any = load_checkpoint(tmp_path / "t2t.pth", LoadHints(heads=4)).spec
    assert (spec.class_token, spec.spt, spec.lsa, spec.mask.kind) == (True, True, False, "plain")
    with pytest.raises(CheckpointError, match="does not determine the number of attention heads"):
        load_checkpoint(tmp_path / "t2t.pth")


@pytest.mark.parametrize(("name", "heads"), [("sl_vit", 3), ("sl_pit", 1), ("sl_t2t", 4), ("sl_cait", 3)])
def test_options_must_agree_with_the_temperatures(name: str, heads: int) -> None:
    load_checkpoint(golden(name).path, LoadHints(heads=heads))
    with pytest.raises(CheckpointError, match=f"--set heads=6, but .* {heads}"):
        load_checkpoint(golden(name).path, LoadHints(heads=6))
    with pytest.raises(CheckpointError, match="--set source=vit-pytorch"):
        load_checkpoint(golden(name).path, LoadHints(source="vit-pytorch"))
