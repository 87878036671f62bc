"""RMT: merge norms, scales and residuals into the weights of their neighbours, and store the rotations as tables.

Every pass is exact in real arithmetic. Sums and products are computed in float64, then rounded to the data type of the
weights.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.models.families.rmt.model import (
    RMT,
    DecomposedAttention,
    FoldedRotation,
    GridConvolution,
    LayerScale,
    ManhattanAttention,
    NormedConvolution,
    NormedLinear,
    PairRotation,
    RMTBlock,
    Stage,
    TokenAttention,
)
from gmmvit_deploy.models.layers.blocks import BatchNorm
from gmmvit_deploy.models.scores.attention import attention_scores
from gmmvit_deploy.models.scores.scales import Scale
from gmmvit_deploy.models.scores.step import Constant


@torch.no_grad()
def merge_batch_norms(model: nn.Module) -> tuple[str, ...]:
    """Merge each BatchNorm, y = s · x + t for each feature, into the convolution or the linear layer beside it.

    BatchNorm behind W x + b                 →  (diag(s) W) x + (s · b + t)
    head(mean(BatchNorm(x))), 2023           →  head' with W' = W diag(s), b' = b + W t: BatchNorm is affine, so it
                                                commutes with the mean over the tokens

    Ensures: no BatchNorm remains.
    """
    changed = []
    for name, module in model.named_modules():
        if isinstance(module, NormedConvolution | NormedLinear) and module.norm is not None:
            layer = module.convolution if isinstance(module, NormedConvolution) else module.linear
            scale, shift = module.norm.affine()
            _set(layer.weight, scale.reshape(-1, *[1] * (layer.weight.dim() - 1)) * layer.weight.double())
            _set(_bias(name, layer), scale * _bias(name, layer).double() + shift)
            module.norm = None
            changed.append(name)
    if isinstance(model, RMT) and model.norm is not None:
        scale, shift = model.norm.affine()
        weight = model.head.weight.double()
        _set(model.head.bias, model.head.bias.double() + weight @ shift)
        _set(model.head.weight, weight * scale)
        model.norm = None
        changed.append("norm")
    if left := [name for name, module in model.named_modules() if isinstance(module, BatchNorm)]:
        raise FoldError(f"merge_batch_norms did not merge these BatchNorms into a layer: {', '.join(left)}")
    return tuple(changed)


@torch.no_grad()
def merge_scale_into_keys(model: nn.Module) -> tuple[str, ...]:
    """Merge the scale of the scores into the projection of K: Q (W_k x + b_k)ᵀ · s  →  Q (s W_k x + s b_k)ᵀ.

    The rotation of Q and K is linear, so the scale commutes with the rotation.
    Ensures: no scale remains in an attention of an RMT.
    """
    changed = []
    for name, attention in _attentions(model):
        steps = [(part.scores, step_name, step) for part in attention.attentions() for step_name, step in _scales(part)]
        if not steps:
            continue
        factor, *others = {step.factor for _, _, step in steps}
        if others or len(steps) != len(attention.attentions()):
            raise FoldError(f"{name}: expected the same scale before each softmax")
        weight, bias = _stacked(name, attention)
        for tensor in (weight, bias):
            keys = tensor.chunk(3)[1]
            _set(keys, factor * keys.double())
        for scores, step_name, _ in steps:
            scores.put(step_name, None)
        changed.append(name)
    return tuple(changed)


@torch.no_grad()
def merge_branch_scales(model: nn.Module) -> tuple[str, ...]:
    """Merge each LayerScale into the last linear layer of its branch: γ ∘ (W x + b)  →  (diag(γ) W) x + γ ∘ b.

    Ensures: no LayerScale remains.
    """
    changed = []
    for name, block in model.named_modules():
        if not isinstance(block, RMTBlock):
            continue
        for scale_name, layer in (("attention_scale", block.attention.out), ("mlp_scale", block.mlp.second)):
            scale = getattr(block, scale_name)
            if scale is None:
                continue
            gamma = scale.gamma.double()
            _set(layer.weight, gamma[:, None] * layer.weight.double())
            _set(_bias(name, layer), gamma * _bias(name, layer).double())
            setattr(block, scale_name, None)
            changed.append(f"{name}.{scale_name}")
    if left := [name for name, module in model.named_modules() if isinstance(module, LayerScale)]:
        raise FoldError(f"merge_branch_scales did not merge these factors into a linear layer: {', '.join(left)}")
    return tuple(changed)


@torch.no_grad()
def merge_residual_convolutions(model: nn.Module) -> tuple[str, ...]:
    """Merge the input that is added to a depthwise convolution into the kernel: x + K ∗ x  →  (K + δ) ∗ x.

    δ: the kernel that is 1 at the centre and 0 elsewhere.
    """
    changed = []
    for name, module in model.named_modules():
        if isinstance(module, GridConvolution) and module.adds_input:
            kernel = module.convolution.weight
            row, column = (side // 2 for side in kernel.shape[-2:])
            kernel[..., row, column] += 1
            module.adds_input = False
            changed.append(name)
    return tuple(changed)


@torch.no_grad()
def fold_rotations(model: nn.Module) -> tuple[str, ...]:
    """Store cos and sin of each rotation, and reorder the features of Q and K so that halves of a head are rotated.

    Features of a head: 0, 1, 2, 3, …  →  0, 2, …, d−2, 1, 3, …, d−1, for Q and K alike, so Q Kᵀ stays the same sum in
    another order. The rows of the projection of Q and K are reordered, and `FoldedRotation` replaces `PairRotation`.

    Ensures: on random inputs, the folded rotation of reordered features equals the reordered result of the trained
    rotation bit for bit.
    """
    changed = []
    for name, stage in model.named_modules():
        if not isinstance(stage, Stage) or not isinstance(stage.rotation, PairRotation):
            continue
        projections = [_stacked(f"{name}.{path}", attention) for path, attention in _attentions(stage)]
        trained, dim = stage.rotation, projections[0][0].shape[1]
        head_dim, (cos, sin) = trained.angle.numel(), trained.tables()
        heads = dim // head_dim
        order = torch.cat((torch.arange(0, head_dim, 2), torch.arange(1, head_dim, 2)))
        cos, sin = cos[..., order], torch.cat((-sin[..., 0::2], sin[..., 1::2]), dim=-1)
        folded = FoldedRotation(torch.cat([cos] * heads, dim=-1), torch.cat([sin] * heads, dim=-1), head_dim=head_dim)
        features = torch.cat([head * head_dim + order for head in range(heads)])
        sample = torch.randn(1, *cos.shape[:-1], dim, generator=torch.Generator().manual_seed(0)).to(cos.dtype)
        if not folded(sample[..., features]).equal(trained(sample)[..., features]):
            raise FoldError(f"{name}.rotation: the rotation with stored tables changes the output")
        for tensors in projections:
            for tensor in tensors:
                for part in tensor.chunk(3)[:2]:
                    part.copy_(part[features])
        stage.rotation = folded
        changed.append(f"{name}.rotation")
    return tuple(changed)


@torch.no_grad()
def share_decays(model: nn.Module) -> tuple[str, ...]:
    """Store equal decays of a stage in a single tensor, which all blocks of the stage read.

    The constants of a grid of n tokens are (H, n, n), so copies for each block would be most of a graph for large
    images.
    Requires: folded biases.
    Ensures: no two attentions of a stage hold equal constants in different tensors.
    """
    changed = []
    for name, stage in model.named_modules():
        if not isinstance(stage, Stage):
            continue
        held: list[Tensor] = []
        for attention, scores in attention_scores(stage):
            for _, step in scores.steps_before():
                if not isinstance(step, Constant) or step.role != "score_bias":
                    continue
                equal = next((tensor for tensor in held if tensor.equal(step.constant)), None)
                if equal is None:
                    held.append(step.constant)
                elif equal is not step.constant:
                    step.constant = equal
                    changed.append(f"{name}.{attention}")
    return tuple(changed)


def join_rows(model: nn.Module) -> tuple[str, ...]:
    """Move the rows and columns of decomposed attention into the batch, for fused kernels with four dimensions.

    Scores (B, h, H, w, w)  →  (B·h, H, w, w), and (B, w, H, h, h)  →  (B·w, H, h, h). All rows have the same decay.
    """
    changed = []
    for name, attention in _attentions(model):
        if isinstance(attention, DecomposedAttention) and not attention.joined:
            attention.joined = True
            changed.append(name)
    return tuple(changed)


@torch.no_grad()
def merge_token_weight(model: nn.Module) -> tuple[str, ...]:
    """Merge the weight of the token head into the head: ½ · max(W x + b)  →  max(½ W x + ½ b), bit for bit."""
    if not isinstance(model, RMT) or model.token_head is None or model.token_weight == 1:
        return ()
    for tensor in (model.token_head.weight, model.token_head.bias):
        tensor.mul_(model.token_weight)
    model.token_weight = 1.0
    return ("token_head",)


def _attentions(model: nn.Module) -> Iterator[tuple[str, ManhattanAttention]]:
    for name, module in model.named_modules():
        if isinstance(module, ManhattanAttention):
            yield name, module


def _scales(part: TokenAttention) -> list[tuple[str, Scale]]:
    return [(name, step) for name, step in part.scores.steps() if isinstance(step, Scale)]


def _stacked(name: str, attention: ManhattanAttention) -> tuple[Tensor, Tensor]:
    if not isinstance(attention.qkv, nn.Linear):
        raise FoldError(
            f"{name}: expected a single linear layer for Q, K and V; run this pass before the engine passes"
        )
    return attention.qkv.weight, attention.qkv.bias


def _bias(name: str, layer: nn.Conv2d | nn.Linear) -> Tensor:
    if layer.bias is None:
        raise FoldError(f"{name}: expected a layer with a bias")
    return layer.bias


def _set(tensor: Tensor, values: Tensor) -> None:
    tensor.copy_(values.to(tensor.dtype))
