"""DeepViT: merge what follows the head mixing, the scale adjustment, and the BatchNorms of the stem into weights.

c_g = s·γ_g/√(σ²_g+ε):   Θ'[g,h] = c_g·Θ[g,h];   β'_g = c_g·(θ_g − μ_g) + s·β_g            (`merge_head_norm`)
LN(a·x; ε) = LN(x; ε/a²);   1/a into the last linear layer of each branch                  (`merge_scale_adjustment`)
W' = W·γ/√(σ²+ε),  b' = β − μ·γ/√(σ²+ε)                                                   (`merge_stem_norms`)
"""

from __future__ import annotations

import copy
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.models.families.deepvit.model import ConvolutionStem, DeepViTBlock
from gmmvit_deploy.models.layers.attention import ReAttention
from gmmvit_deploy.models.layers.blocks import BatchNorm
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.layers.proofs import change_modules, random_values
from gmmvit_deploy.models.scores.heads import HeadBatchNorm, HeadMixing
from gmmvit_deploy.models.scores.step import Step

_TOKENS = 5


@torch.no_grad()
def merge_head_norm(model: Model) -> tuple[str, ...]:
    """Merge the bias of the head mixing, BatchNorm and transform scale into the head mixing and into the side of V.

    Σ_j (c_g·m[j] + β'_g)·V[g, j]  =  Σ_j (c_g·m[j])·V[g, j] + β'_g·Σ_j V[g, j],  with m the mixed weights

    The offset β'_g is the same for all pairs of tokens, so it needs no N × N addition: the attention adds the sum over
    the tokens of V, times β'_g, to every token.
    Ensures: the only step after softmax is the head mixing, and in float64 the attention outputs the same values up to
    rounding.
    """
    return change_modules(
        "merge_head_norm",
        model,
        ReAttention,
        _merge_norm,
        lambda attention: random_values(2, _TOKENS, cast("nn.Linear", attention.out).out_features),
    )


def _merge_norm(attention: ReAttention) -> bool:
    if len(attention.scores.after) < 2:
        return False
    if attention.training:
        raise FoldError("the model is in training mode; folding is for inference", hint="call model.eval()")
    (mixing_name, mixing), *rest = attention.scores.steps_after()
    like = mixing.matrix().detach()
    weight = like.double()
    factors, offsets = torch.ones_like(weight[0]), torch.zeros_like(weight[0])
    for name, step in rest:
        factor, offset = _by_head(step)
        factors, offsets = factors * factor, offsets * factor + offset
        attention.scores.put(name, None)
    merged = HeadMixing((weight * factors).to(like).contiguous())
    attention.scores.put(mixing_name, merged.requires_grad_(False))
    attention.value_factor = offsets[:, None].to(like)
    return True


def _by_head(step: Step) -> tuple[Tensor, Tensor]:
    """Return the factor and the offset of a step by head, in float64, (H) or (1)."""
    if isinstance(step, HeadBatchNorm):
        factor, offset = copy.deepcopy(step).double().matrix()
        return factor, offset
    by_head = step.matrix().detach().double().flatten()
    if step.operation == "multiply":
        return by_head, torch.zeros_like(by_head)
    return torch.ones_like(by_head), by_head


@torch.no_grad()
def merge_scale_adjustment(model: Model) -> tuple[str, ...]:
    """Merge the scale adjustment a into the epsilons of the norms and into the last linear layer of each branch.

    LN(a·x; ε)  →  LN(x; ε/a²);   (W h + b) / a  →  (W/a) h + b/a

    If a is a power of two, W/a and b/a are exact bit for bit.
    Ensures: no block multiplies or divides by a, and in float64 each block outputs the same values up to rounding.
    """
    return change_modules(
        "merge_scale_adjustment",
        model,
        DeepViTBlock,
        _merge_adjustment,
        lambda block: random_values(2, _TOKENS, block.attention_norm.normalized_shape[0]),
    )


def _merge_adjustment(block: DeepViTBlock) -> bool:
    a = block.scale_adjustment
    if a == 1:
        return False
    for norm in (block.attention_norm, block.mlp_norm):
        norm.eps /= a**2
    for last in (block.attention.out, block.mlp[-1]):
        cast("nn.Linear", last).weight.div_(a)
        cast("nn.Linear", last).bias.div_(a)
    block.scale_adjustment = 1.0
    return True


@torch.no_grad()
def merge_stem_norms(model: Model) -> tuple[str, ...]:
    """Merge each BatchNorm of the convolution stem into the convolution before the BatchNorm.

    γ·(W∗x − μ)/√(σ²+ε) + β  →  W'∗x + b'.  Each BatchNorm follows its convolution, so that the zeros of the padding,
    which the convolution reads, stay zeros.

    Ensures: the stem has no BatchNorm, and in float64 the stem outputs the same values for an image up to rounding.
    """
    stems = change_modules(
        "merge_stem_norms",
        model,
        ConvolutionStem,
        _merge_norms,
        lambda stem: random_values(1, cast("nn.Conv2d", stem.convolutions[0]).in_channels, 12, 12),
    )
    return tuple(f"{name}.convolutions.{index}" for name in stems for index in range(2))


def _merge_norms(stem: ConvolutionStem) -> bool:
    changed = False
    for index, norm in enumerate(stem.norms):
        convolution = cast("nn.Conv2d", stem.convolutions[index])
        if not isinstance(norm, BatchNorm):
            continue
        convolution.weight, bias = fuse_conv_bn_weights(
            convolution.weight,
            convolution.bias,
            norm.running_mean,
            norm.running_var,
            norm.eps,
            norm.weight,
            norm.bias,
        )
        convolution.bias = bias.requires_grad_(False)
        convolution.weight.requires_grad_(False)
        stem.norms[index] = nn.Identity()
        changed = True
    return changed
