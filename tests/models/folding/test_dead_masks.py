"""Masks without influence on the logits are removed, and no other mask."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import gmmvit_deploy.models.folding.dead_masks as passes
from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.models.families import model_from_spec
from gmmvit_deploy.models.families.pit import PiTSpec
from gmmvit_deploy.models.families.vit import ViTSpec
from gmmvit_deploy.models.folding.dead_masks import dead_masks, drop_dead_masks
from gmmvit_deploy.models.folding.fold import fold
from gmmvit_deploy.models.folding.passes import fold_masks
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.scores.attention import attention_scores
from gmmvit_deploy.models.scores.masks import ElementwiseMask, Mask, PrefixMask
from gmmvit_deploy.models.specs import MaskSpec, input_shape
from tests.conftest import Golden
from tests.golden_files import trained
from tests.models.families.test_families import pit_specs

LAST_OF_PIT = "stages.2.0.attention"


def vit(masks: Callable[[], Mask | None], *, class_token: bool, depth: int = 3) -> Model:
    """Return a small ViT with random weights and the given mask in each attention; it has 16 patches."""
    spec = ViTSpec(
        image_size=8, patch_size=2, classes=3, dim=8, depth=depth, heads=2, head_dim=4, mlp_dim=8,
        class_token=class_token, mask=MaskSpec(),
    )  # fmt: skip
    torch.manual_seed(0)
    model = model_from_spec(spec).eval().requires_grad_(False)
    for _, scores in attention_scores(model):
        mask = masks()
        if mask is not None:
            scores.before["mask"] = mask
    return model


def elm(tokens: int) -> ElementwiseMask:
    return ElementwiseMask(torch.rand(tokens, tokens) + 0.5)


def test_only_the_last_mask_of_a_pit_is_removed(each_golden: Golden) -> None:
    result = fold(load_checkpoint(each_golden.path, each_golden.hints).model)
    dead = (LAST_OF_PIT,) if each_golden.name in ("pit_gmm", "pit_elm") else ()
    assert result.passes["drop_dead_masks"] == dead
    assert not {entry.layer for entry in result.masks} & set(dead)
    if dead:
        assert [entry.layer for entry in result.masks] == ["stages.0.0.attention", "stages.1.0.attention",
                                                           "stages.1.1.attention"]  # fmt: skip
        assert [name for name, _ in dict(attention_scores(result.model))[LAST_OF_PIT].steps()] == ["before.scale"]
    assert fold(result.model).passes["drop_dead_masks"] == ()


@settings(max_examples=15, deadline=None)
@given(spec=pit_specs(), seed=st.integers(0, 2**16))
def test_every_pit_loses_its_last_mask_alone(spec: PiTSpec, seed: int) -> None:
    assume(spec.dim > 2)  # LayerNorm gives ±1 for two values, so no mask changes the logits, and all masks stay
    torch.manual_seed(seed)
    model = model_from_spec(spec).eval().requires_grad_(False)
    masked = [layer for layer, scores in attention_scores(model) if "mask" in scores.before]
    images = torch.randn(2, *input_shape(spec))
    expected = model(images)
    fold_masks(model)
    assert drop_dead_masks(model) == tuple(masked[-1:])
    assert model(images).equal(expected)


@pytest.mark.first(2)
@pytest.mark.parametrize("value", [0.0, 1e-30, 1e6])
@pytest.mark.parametrize("part", ["head.", "stages.1.", ""])
def test_trained_values_make_no_mask_dead(part: str, value: float) -> None:
    """Zeros in the head, in a stage or everywhere hide the masks of the trained network, but not from the search."""
    model = trained("pit_gmm")
    for name, parameter in model.named_parameters():
        if name.startswith(part) and "mask" not in name:
            parameter.fill_(value)
    assert dead_masks(model) == ((LAST_OF_PIT, "before.mask"),)


def test_a_class_token_after_which_nothing_else_is_read() -> None:
    model = vit(lambda: PrefixMask(elm(16)), class_token=True)
    assert dead_masks(model) == (("blocks.2.attention", "before.mask"),)


def test_one_entry_that_is_read_keeps_a_mask() -> None:
    def mask(change: int) -> ElementwiseMask:
        made = PrefixMask(elm(16)).matrix().detach().clone()
        made[0, change] = 1 + 2**-20
        return ElementwiseMask(made)

    assert dead_masks(vit(lambda: mask(7), class_token=True)) == ()
    assert dead_masks(vit(lambda: mask(0), class_token=True)) == ()


def test_a_mask_that_is_removed_wrongly_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained("pit_gmm")
    fold_masks(model)
    monkeypatch.setattr(passes, "dead_masks", lambda _: (("stages.1.1.attention", "before.mask"),))
    with pytest.raises(FoldError, match=r"changed the logits by .* removed the masks of stages\.1\.1\.attention"):
        drop_dead_masks(model)


def test_logits_that_are_not_finite_keep_all_masks() -> None:
    model = trained("pit_gmm")
    fold_masks(model)
    model.head.weight.fill_(float("nan"))
    assert drop_dead_masks(model) == ()
