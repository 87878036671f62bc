"""Folding passes for networks of transformers.

    γ ∘ (W x + b)                       →  (γ ∘ W) x + γ ∘ b    LayerScale of DINOv2 and BEiT
    resampled position embeddings       →  stored               DINOv2, for images of another size than the positions
    adaptive average of all tokens      →  mean                 Swin
    W ∗ (channels in reverse order)     →  (W reversed) ∗ x     MobileViT

The modules belong to transformers, so each pass is `tried` on a copy.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from gmmvit_deploy.models.layers.proofs import merge_factor, tried
from gmmvit_deploy.models.specs import input_shape

_SCALED = (
    ("layer_scale1.lambda1", "attention.o_proj"),
    ("layer_scale2.lambda1", "mlp.fc2"),
    ("lambda_1", "attention.o_proj"),
    ("lambda_2", "mlp.fc2"),
)
"""(factor, linear layer) in a block of DINOv2 and of BEiT."""


class MeanOfTokens(nn.Module):
    """(B, D, N) → (B, D, 1): the mean over the tokens."""

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens.mean(dim=-1, keepdim=True)


@tried
def reverse_channels(model: Any) -> tuple[str, ...]:
    """Reverse the channels of the first convolution in place of those of the images."""
    if not getattr(model, "reverses", False):
        return ()
    path, first = next((path, part) for path, part in model.network.named_modules() if isinstance(part, nn.Conv2d))
    first.weight.copy_(first.weight.flip(1))
    model.reverses = False
    return (f"network.{path}",)


@tried
def merge_layer_scales(model: Any) -> tuple[str, ...]:
    """Merge LayerScale into the output projection of each attention and the second linear layer of each mlp."""
    changed = []
    for path, block in model.network.named_modules():
        for factor, name in _SCALED:
            scale, _, inner = factor.partition(".")
            part, _, last = name.partition(".")
            held = getattr(block, scale, None)
            gamma = getattr(held, inner, None) if inner else held
            if merge_factor(getattr(getattr(block, part, None), last, None), gamma):
                delattr(block, scale)
                setattr(block, scale, nn.Identity() if inner else 1.0)
                changed.append(f"network.{path}.{name}")
    return tuple(changed)


@tried
def store_positions(model: Any) -> tuple[str, ...]:
    """Store the position embeddings that DINOv2 resamples for the size of square images in every forward pass."""
    _, height, width = input_shape(model.spec)
    changed = []
    for path, module in model.network.named_modules():
        positions = getattr(module, "position_embeddings", None)
        patch = getattr(getattr(module, "patch_embeddings", None), "patch_size", None)
        if height != width or not isinstance(positions, nn.Parameter) or not isinstance(patch, tuple | list):
            continue
        patches = (height // patch[0]) * (width // patch[1])
        if not hasattr(module, "interpolate_pos_encoding") or positions.shape[1] == patches + 1:
            continue
        tokens = positions.new_empty(1, patches + 1, positions.shape[-1])
        resampled = module.interpolate_pos_encoding(tokens, height, width)
        if resampled.shape == positions.shape:
            continue
        module.position_embeddings = nn.Parameter(resampled.clone(), requires_grad=False)
        changed.append(f"network.{path}")
    return tuple(changed)


@tried
def pool_by_mean(model: Any) -> tuple[str, ...]:
    """Replace an adaptive average pooling to a single value by the mean, which ONNX has as an operator."""
    changed = []
    for path, module in [*model.network.named_modules()]:
        if isinstance(module, nn.AdaptiveAvgPool1d) and module.output_size in (1, (1,)):
            model.network.set_submodule(path, MeanOfTokens())
            changed.append(f"network.{path}")
    return tuple(changed)
