"""Folding pass that removes masks without influence on the logits."""

from __future__ import annotations

import torch

from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.models.layers.dead_masks import can_be_dead, dead_masks
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.scores.attention import attention_scores
from gmmvit_deploy.models.specs import input_shape

_IMAGES = 2


@torch.no_grad()
def drop_dead_masks(model: Model) -> tuple[str, ...]:
    """Remove each mask that has no influence on the logits: M ∘ S  →  S, and each decay D: S + D  →  S.

    In a network with a class token, `dead_masks` reports the mask of the last attention. After this attention, the
    network reads only the class token, and the mask multiplies the scores in the class token's row by exactly 1.
    Requires: evaluation mode; folded masks; a scale that is not merged into the mask yet, because M · d^(−1/2) has no
    entries of exactly 1.
    Unchanged: all masks, if the model has logits that are not finite on random images, because the pass cannot compare
    such logits.
    Ensures: the logits of random images are the same before and after the pass, bit for bit.
    Errors: FoldError when a requirement or the end state does not hold.
    """
    if not any(can_be_dead(step) for _, scores in attention_scores(model) for _, step in scores.steps()):
        return ()
    if model.training:
        raise FoldError("the model is in training mode; folding is for inference", hint="call model.eval()")
    dead = dead_masks(model)
    if not dead:
        return ()
    images = _random_images(model)
    before = model(images)
    if not bool(before.isfinite().all()):
        return ()
    scores = dict(attention_scores(model))
    for layer, name in dead:
        step = dict(scores[layer].steps())[name]
        if step.role == "mask" and not step.is_constant:
            raise FoldError(f"{layer}: the mask must be a constant before drop_dead_masks; run fold_masks first")
        scores[layer].put(name, None)
    after = model(images)
    if not after.equal(before):
        layers = ", ".join(layer for layer, _ in dead)
        off = float((after - before).abs().max())
        raise FoldError(
            f"drop_dead_masks changed the logits by {off:.2e} when it removed the masks of {layers}; expected no change"
        )
    return tuple(layer for layer, _ in dead)


def _random_images(model: Model) -> torch.Tensor:
    like = next(model.parameters())
    generator = torch.Generator().manual_seed(1)
    return torch.randn(_IMAGES, *input_shape(model.spec), generator=generator).to(like)
