from __future__ import annotations

import pytest
import torch

from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.models.families.vit import ViTSpec
from gmmvit_deploy.models.families.vit.model import ViT
from gmmvit_deploy.models.folding.fold import fold, narrow_last_block
from gmmvit_deploy.models.folding.passes import fold_masks
from gmmvit_deploy.models.layers.blocks import Mlp
from gmmvit_deploy.models.scores.attention import AttentionScores, attention_scores
from gmmvit_deploy.models.specs import MaskSpec
from tests.conftest import golden

MASKED = {
    "gmm": MaskSpec(kind="gmm", kernels=3),
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


def test_leaves_plain_attention_alone() -> None:
    model = small(MaskSpec())
    result = fold(model)
    assert [name for name, changed in result.passes.items() if changed] == ["narrow_last_block"]
    assert result.masks == ()
    assert all(roles(scores) == ["scale"] for _, scores in attention_scores(result.model))
    assert all(scores.before.scale.factor == 5**-0.5 for _, scores in attention_scores(result.model))


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


def test_a_mean_that_is_not_the_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mlp, "mean_over_tokens", lambda mlp, x: mlp(x[:, :1]))
    with pytest.raises(FoldError, match="narrow_last_block changed the mean of the output tokens by"):
        narrow_last_block(small(MASKED["gmm"]))
