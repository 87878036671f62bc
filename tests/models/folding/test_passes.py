from __future__ import annotations

import numpy as np
import pytest
import torch

from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.models.families.vit.model import ViT
from gmmvit_deploy.models.families.vit.spec import ViTSpec
from gmmvit_deploy.models.folding.fold import fold
from gmmvit_deploy.models.folding.passes import fold_masks, merge_scale
from gmmvit_deploy.models.scores.attention import AttentionScores, attention_scores
from gmmvit_deploy.models.scores.step import Constant
from gmmvit_deploy.models.specs import MaskSpec
from tests.conftest import Golden, golden

MASKED = {
    "gmm": MaskSpec(kind="gmm", kernels=3),
    "shared": MaskSpec(kind="gmm", kernels=3, shared=True),
    "closed": MaskSpec(kind="gmm", kernels=3, closed_form=True),
    "elm": MaskSpec(kind="elm"),
}


def roles(scores: AttentionScores) -> list[str]:
    return [step.role for _, step in scores.steps()]


def small(mask: MaskSpec) -> ViT:
    spec = ViTSpec(
        image_size=16,
        patch_size=4,
        classes=3,
        dim=12,
        depth=2,
        heads=2,
        head_dim=5,
        mlp_dim=8,
        class_token=mask.kind == "plain",
        mask=mask,
    )
    return ViT(spec).eval()


@pytest.mark.parametrize("mask", MASKED.values(), ids=MASKED.keys())
def test_folded_mask_equals_the_trained_mask_bit_for_bit(mask: MaskSpec) -> None:
    model = small(mask)
    for (_, trained), record in zip(attention_scores(model), fold(model).masks, strict=True):
        mask = trained.before.mask
        assert record.trained.numpy().tobytes() == mask.matrix().detach().numpy().tobytes()
        # the factor by which the trained module multiplies
        ones = torch.ones(1, 2, 16, 16)
        assert mask(ones)[0].detach().equal(record.trained.expand(2, 16, 16))


@pytest.mark.first(2)
def test_folds_the_released_masks(each_golden: Golden) -> None:
    loaded = load_checkpoint(each_golden.path, each_golden.hints)
    result = fold(loaded.model)
    masked = sum("mask" in roles(scores) for _, scores in attention_scores(loaded.model))
    assert len(result.masks) == masked - len(result.passes["drop_dead_masks"])
    assert bool(masked) == (loaded.spec.mask.kind != "plain")
    assert len(result.biases) == (sum(loaded.spec.depths) if loaded.spec.family == "swin" else 0)
    with torch.inference_mode():
        logits = result.model(torch.from_numpy(each_golden.inputs)).numpy()
    np.testing.assert_allclose(logits, each_golden.logits, rtol=0, atol=each_golden.atol)


def test_leaves_plain_attention_alone() -> None:
    model = small(MaskSpec())
    result = fold(model)
    assert [name for name, changed in result.passes.items() if changed] == ["narrow_last_block"]
    assert result.masks == ()
    assert all(roles(scores) == ["scale"] for _, scores in attention_scores(result.model))
    assert all(scores.before.scale.factor == 5**-0.5 for _, scores in attention_scores(result.model))


@pytest.mark.parametrize("mask", MASKED.values(), ids=MASKED.keys())
def test_nothing_learned_is_left_of_a_mask(mask: MaskSpec) -> None:
    result = fold(small(mask))
    names = set(result.model.state_dict())
    assert not {name for name in names if name.endswith(("alpha", "sigma", "base", "mask.weight"))}
    for _, scores in attention_scores(result.model):
        assert roles(scores) == ["mask"]
        assert isinstance(scores.before.mask, Constant)


def test_folding_twice_changes_nothing(each_golden: Golden) -> None:
    once = fold(load_checkpoint(each_golden.path, each_golden.hints).model)
    twice = fold(once.model)
    assert not any(twice.passes.values())
    before, after = once.model.state_dict(), twice.model.state_dict()
    assert before.keys() == after.keys()
    assert all(before[name].equal(after[name]) for name in before)


def test_the_trained_model_stays_as_it_is() -> None:
    model = small(MASKED["gmm"])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fold(model)
    assert all(model.state_dict()[name].equal(tensor) for name, tensor in before.items())


def test_merged_constant_is_mask_times_scale() -> None:
    for record in fold(small(MASKED["gmm"])).masks:
        assert record.constant.equal(record.trained * 5**-0.5)


def test_merge_scale_requires_folded_masks() -> None:
    with pytest.raises(FoldError, match="must be constants before a merge"):
        merge_scale(small(MASKED["gmm"]))


def test_fold_masks_requires_evaluation_mode() -> None:
    with pytest.raises(FoldError, match="training mode"):
        fold_masks(small(MASKED["gmm"]).train())


def test_fold_first_cast_second() -> None:
    with pytest.raises(FoldError, match="fold the model before casting"):
        fold_masks(small(MASKED["gmm"]).half())


def test_a_mask_that_is_not_finite_is_refused() -> None:
    model = small(MASKED["elm"])
    with torch.no_grad():
        model.blocks[0].attention.scores.before.mask.weight[0, 0] = float("nan")
    with pytest.raises(FoldError, match=r"blocks\.0\.attention: the mask has NaN"):
        fold_masks(model)


def test_the_proof_can_fail() -> None:
    """Folding of a mask whose matrix changes from call to call cannot be proven."""
    model = small(MASKED["elm"])

    class Restless(type(model.blocks[0].attention.scores.before.mask)):  # type: ignore[misc]
        def matrix(self) -> torch.Tensor:
            return torch.randn(16, 16)

    model.blocks[1].attention.scores.before.mask = Restless(torch.zeros(16, 16))
    with pytest.raises(FoldError, match=r"blocks\.1\.attention: the folded mask is not bitwise equal"):
        fold_masks(model)


def test_256_tokens_keep_their_zeros() -> None:
    case = golden("vit_gmm_256_tokens")
    for record in fold(load_checkpoint(case.path).model).masks:
        assert int((record.constant == 0).all(0).sum()) >= 21792
