from __future__ import annotations

import pytest
import torch
from torch import nn

from gmmvit_deploy.bench.roofline import work_of_graph
from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.export.onnx_from_model import onnx_from_model
from gmmvit_deploy.models.families.cait.folding import merge_layer_scale
from gmmvit_deploy.models.families.cait.wide_heads import widen_heads
from gmmvit_deploy.models.families.t2t.folding import drop_unused, unfold_as_convolution
from gmmvit_deploy.models.folding.fold import fold, fold_for_engines
from gmmvit_deploy.models.folding.last_block import narrow_last_block
from gmmvit_deploy.models.folding.passes import fold_biases, fold_masks, merge_scale, merge_scale_into_mixing
from gmmvit_deploy.models.layers.blocks import Mlp
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.layers.unfolding import Unfold, UnfoldConvolution
from gmmvit_deploy.models.scores.attention import attention_scores
from gmmvit_deploy.models.scores.step import Constant
from tests.conftest import golden


def trained(name: str) -> Model:
    case = golden(name)
    return load_checkpoint(case.path, case.hints).model.requires_grad_(False)


def test_swin_biases_equal_the_trained_biases_bit_for_bit() -> None:
    model = trained("swin_gmm_whole_grid")
    result = fold(model)
    shapes = []
    for (_, scores), record in zip(attention_scores(model), result.biases, strict=True):
        assert record.constant.equal(scores.before.bias.matrix())
        shapes.append(tuple(record.constant.shape))
    # shifted blocks have a bias for each window; the last stage has a single window, which is not shifted
    assert shapes == [(3, 16, 16), (16, 3, 16, 16), (6, 16, 16), (4, 6, 16, 16), (12, 16, 16), (12, 16, 16)]


def test_fold_biases_requires_evaluation_mode() -> None:
    with pytest.raises(FoldError, match="training mode"):
        fold_biases(trained("swin_plain").train())


def test_a_bias_that_is_not_finite_is_refused() -> None:
    model = trained("swin_plain")
    next(attention_scores(model))[1].before.bias.table[0, 0] = float("inf")
    with pytest.raises(FoldError, match="the bias has NaN or infinite"):
        fold_biases(model)


def test_pit_masks_leave_the_class_token_alone() -> None:
    for record in fold(trained("pit_gmm")).masks:
        assert bool((record.trained[:, 0] == 1).all())
        assert bool((record.trained[:, :, 0] == 1).all())
        assert not bool((record.trained[:, 1:, 1:] == 1).all())


def test_layer_scale_requires_a_linear_map_to_go_into() -> None:
    model = trained("cait_plain")
    model.patch_blocks[0].mlp.inner = nn.Sequential(nn.GELU())
    with pytest.raises(FoldError, match="expected the residual branch to end in a linear layer"):
        merge_layer_scale(model)


def test_scale_goes_into_the_mixing_only_without_a_mask() -> None:
    model = trained("cait_plain")
    before = model.patch_blocks[0].attention.inner.scores.before.mixing.weight.clone()
    assert len(merge_scale_into_mixing(model)) == 3 + 2
    assert model.patch_blocks[0].attention.inner.scores.before.mixing.weight.equal(before * 16**-0.5)
    with pytest.raises(FoldError, match="a mask multiplies the scaled scores"):
        merge_scale_into_mixing(trained("cait_gmm"))
    masked = trained("cait_gmm")
    fold_masks(masked)
    assert len(merge_scale(masked)) == 3
    assert len(merge_scale_into_mixing(masked)) == 2  # the class blocks, which have no mask


def test_constants_are_listed_by_step_and_role() -> None:
    result = fold(trained("cait_elm"))
    first = [entry for entry in result.constants if entry.layer == "patch_blocks.0.attention.inner"]
    assert [(entry.step, entry.role) for entry in first] == [
        ("before.mask", "mask"),
        ("before.mixing", "mixing"),
        ("after.mixing", "mixing"),
    ]
    before, after = (entry for entry in result.constants if entry.layer == "class_blocks.0.attention.inner")
    assert before.constant.equal(before.trained * 16**-0.5)
    assert after.constant.equal(after.trained)
    assert [entry.layer for entry in result.masks] == [f"patch_blocks.{i}.attention.inner" for i in range(3)]
    # the mixing has become part of the wide heads; their masks stay
    assert {entry.role for entry in fold_for_engines(result, [widen_heads]).constants} == {"mask"}


@pytest.mark.parametrize("side", [2, 3, 8, 32])
def test_unfold_as_convolution_is_exact(side: int) -> None:
    lattice = 1e3 * torch.randn(2, 5, side, side)
    expected = nn.functional.unfold(lattice, 3, stride=2, padding=1).transpose(1, 2)
    assert UnfoldConvolution(Unfold(3, stride=2, padding=1), 5)(lattice).equal(expected)


def test_passes_of_a_family_change_no_other_family() -> None:
    vit = trained("vit_gmm")
    for run in (fold_biases, merge_layer_scale, merge_scale_into_mixing, unfold_as_convolution, drop_unused):
        assert run(vit) == ()
    assert isinstance(next(attention_scores(fold(trained("swin_gmm")).model))[1].before.bias, Constant)


@pytest.mark.nightly
@pytest.mark.integration
def test_the_graph_has_less_to_compute() -> None:
    model = trained("vit_gmm")
    narrowed = fold(model).model
    assert narrowed.blocks[-1].gives == "mean"
    whole = fold(model).model
    whole.blocks[-1].gives = "tokens"
    operations = [
        work_of_graph(onnx_from_model(form, preprocessing=None, max_batch=2), 1).operations
        for form in (narrowed, whole)
    ]
    spec = model.spec
    spared = 2 * (spec.tokens - 1) * spec.mlp_dim * spec.dim
    assert operations[1] - operations[0] == pytest.approx(spared, rel=0.01)


def test_a_mean_that_is_not_the_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mlp, "mean_over_tokens", lambda mlp, x: mlp(x[:, :1]))
    with pytest.raises(FoldError, match="narrow_last_block changed the mean of the output tokens by"):
        narrow_last_block(trained("vit_gmm"))
