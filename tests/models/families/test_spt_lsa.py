"""Shifted patches (SPT) and local attention (LSA): the golden files of the released code, and folding."""

from __future__ import annotations

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
from gmmvit_deploy.models.families.t2t import T2TSpec
from gmmvit_deploy.models.families.t2t.model import T2T
from gmmvit_deploy.models.folding.fold import fold
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.scores.attention import attention_scores
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.runtimes.runners.onnxruntime import OnnxRuntimeRunner
from tests.conftest import cifar_options, golden
from tests.exact import assert_same_logits, exact_logits
from tests.golden_files import tensors_of
from tests.models.families.small_specs import small_spec

Tensors = dict[str, Tensor]


def trained(name: str) -> Model:
    return load_checkpoint(golden(name).path).model


# ---- folding -------------------------------------------------------------------------------------------------------


def test_a_large_remainder_stays() -> None:
    """Where the head mixing makes the −1e-9 larger than a rounding error, folding keeps it."""
    model, large = trained("sl_cait").double(), "patch_blocks.1.attention.inner"
    before: Any = model.get_submodule(f"{large}.scores.before")
    before["temperature"].temperature.data /= 1e3
    torch.nn.init.constant_(before["mixing"].weight, 1e3)
    expected, folded = exact_logits(model, golden("sl_cait").inputs), fold(model)
    # Without the −1e-9, the logits would differ by more than 1e-9.
    assert_same_logits(exact_logits(folded.model, golden("sl_cait").inputs), expected, atol=1e-11)
    assert [name for name, scores in attention_scores(folded.model) if "remainder" in scores.before] == [large]


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
    spec: T2TSpec = replace(small_spec("t2t"), class_token=True, **changes)
    return spec


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
