"""Folding pass that removes the masks without influence on the logits, whatever the weights of the network are.

    every entry M[i,j] that influences the logits is exactly 1   →   M ∘ S and S give the same logits
    every entry D[i,j] of a decay that influences the logits is exactly 0   →   S + D and S give the same logits

If the head reads only the class token, the network reads only row 0 of the softmax weights of the last attention. Row 0
of the mask contains only ones, so the mask does not change what the network reads. The same holds for the row of a
distillation token.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.scores.attention import attention_scores
from gmmvit_deploy.models.scores.biases import PrefixBias
from gmmvit_deploy.models.scores.step import Constant, Step
from gmmvit_deploy.models.specs import input_shape

_IMAGES = 2


@torch.no_grad()
def drop_dead_masks(model: Model) -> tuple[str, ...]:
    """Remove each mask that has no influence on the logits: M ∘ S  →  S, and each decay D: S + D  →  S.

    Requires: evaluation mode; folded masks; a scale that is not merged into the mask yet, because M · d^(−1/2) has no
    entries of exactly 1.
    Unchanged: all masks, if the logits of random images are not finite.
    Ensures: the logits of random images are the same before and after the pass, bit for bit.
    """
    if not any(can_be_dead(step) for _, scores in attention_scores(model) for _, step in scores.steps()):
        return ()
    if model.training:
        raise FoldError("the model is in training mode; folding is for inference", hint="call model.eval()")
    dead = dead_masks(model)
    if not dead:
        return ()
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(_IMAGES, *input_shape(model.spec), generator=generator).to(next(model.parameters()))
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


@torch.no_grad()
def dead_masks(model: Model) -> tuple[tuple[str, str], ...]:
    """Return (name of the attention, name of the step) for each mask without influence on the logits.

    The result depends on the architecture, and on which entries of the masks are exactly 1, but not on other trained
    values: it is that of a copy in float64 with random weights, for random images. A mask is dead if

    - its removal leaves the logits unchanged, bit for bit, with random values in place of all its entries ≠ 1; and
    - random values in place of all its entries change the logits. Otherwise the random network does not read the
      attention, for example because softmax saturates, and the mask counts as live.

    The random values are independent, so the changes of several entries do not cancel in the logits. The masks are
    examined from the last to the first, up to the first live mask: the outputs of earlier attentions are inputs of its
    attention. (The gradient of every entry would give the same result, but autograd would store the attention weights
    of all layers.) If the logits of the random network are not finite, the result is empty.
    """
    if not any(_is_partly_neutral(step) for _, scores in attention_scores(model) for _, step in scores.steps()):
        return ()
    generator = torch.Generator().manual_seed(0)

    def random(like: Tensor) -> Tensor:
        return 1 + 0.5 * torch.randn(like.shape, dtype=torch.float64, generator=generator)

    network = copy.deepcopy(model).cpu().double().eval()
    _fill_with_random_values(network, generator)
    candidates = []
    for layer, scores in attention_scores(network):
        for name, step in list(scores.steps()):
            if _is_partly_neutral(step):
                matrix = step.matrix()
                mask = Constant(torch.where(_is_neutral(step), matrix, random(matrix)), like=step)
                scores.put(name, mask)
                candidates.append((layer, name, scores, mask))
    images = torch.randn(_IMAGES, *input_shape(model.spec), dtype=torch.float64, generator=generator)
    logits = network(images)
    if not bool(logits.isfinite().all()):
        return ()
    dead: list[tuple[str, str]] = []
    for layer, name, scores, mask in reversed(candidates):
        scores.put(name, Constant(random(mask.constant), like=mask))
        if network(images).equal(logits):
            break
        scores.put(name, None)
        if not network(images).equal(logits):
            break
        dead.insert(0, (layer, name))
    return tuple(dead)


def can_be_dead(step: Step) -> bool:
    return step.role == "mask" or isinstance(step, PrefixBias)


def _is_partly_neutral(step: Step) -> bool:
    return can_be_dead(step) and bool(_is_neutral(step).any()) and not bool(_is_neutral(step).all())


def _is_neutral(step: Step) -> Tensor:
    """Return True for each entry of the matrix that does not change the scores."""
    return step.matrix() == (0.0 if step.operation == "add" else 1.0)


def _fill_with_random_values(network: nn.Module, generator: torch.Generator) -> None:
    """Replace all weights, so that activations keep a variance of about 1 and softmax does not saturate.

    A weight with n inputs gets a standard deviation of 1/√n, and a vector gets a standard deviation of 1.
    """
    for module in network.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            module.reset_running_stats()  # training changes these statistics, which are buffers
    for parameter in network.parameters():
        if parameter.is_floating_point():
            inputs = math.prod(parameter.shape[1:])
            random = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
            parameter.copy_(random / math.sqrt(max(inputs, 1)))
