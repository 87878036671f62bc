"""DeepViT in float64, computed from the tensors of a checkpoint by the formulas of the paper authors' code."""

from __future__ import annotations

import torch
from torch.nn import functional

State = dict[str, torch.Tensor]


def deepvit_logits(
    state: State, images: torch.Tensor, *, heads: int, scale_adjustment: float, transform_scale: bool
) -> torch.Tensor:
    """Return the logits (B, C).  state: the tensors of the file.  images: (B, c, S, S)."""
    weights = {name: tensor.double() for name, tensor in state.items()}

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        product = x @ weights[f"{name}.weight"].T
        return product + weights[f"{name}.bias"] if f"{name}.bias" in weights else product

    def layer_norm(x: torch.Tensor, name: str) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        normed = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return normed * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def batch_norm(x: torch.Tensor, name: str) -> torch.Tensor:
        mean, variance, gamma, beta = (
            weights[f"{name}.{part}"][:, None, None] for part in ("running_mean", "running_var", "weight", "bias")
        )
        return gamma * (x - mean) / (variance + 1e-5).sqrt() + beta

    def attention(x: torch.Tensor, name: str) -> torch.Tensor:
        batch, tokens, dim = x.shape
        head_dim = dim // heads
        q, k, v = linear(x, f"{name}.qkv").reshape(batch, tokens, 3, heads, head_dim).permute(2, 0, 3, 1, 4)
        mixed = (torch.einsum("bhid,bhjd->bhij", q, k) * head_dim**-0.5).softmax(-1)
        if f"{name}.reatten_matrix.weight" in weights:
            theta = weights[f"{name}.reatten_matrix.weight"][:, :, 0, 0]
            mixed = torch.einsum("gh,bhij->bgij", theta, mixed)
            mixed = batch_norm(mixed + weights[f"{name}.reatten_matrix.bias"][:, None, None], f"{name}.var_norm")
            mixed = mixed * (head_dim**-0.5 if transform_scale else 1)
        out = torch.einsum("bhij,bhjd->bihd", mixed, v).reshape(batch, tokens, dim)
        return linear(out, f"{name}.proj")

    x = images.double()
    if "patch_embed.conv1.weight" in weights:
        x = functional.conv2d(x, weights["patch_embed.conv1.weight"], stride=2, padding=3)
        x = batch_norm(x, "patch_embed.bn1").clamp(min=0)
        x = functional.conv2d(x, weights["patch_embed.conv2.weight"], padding=1)
        x = batch_norm(x, "patch_embed.bn2").clamp(min=0)
    kernel = weights["patch_embed.proj.weight"]
    x = functional.conv2d(x, kernel, weights["patch_embed.proj.bias"], stride=kernel.shape[-1])
    x = x.flatten(2).transpose(1, 2)
    x = torch.cat([weights["cls_token"].expand(len(x), -1, -1), x], dim=1) + weights["pos_embed"]
    a, block = scale_adjustment, 0
    while f"blocks.{block}.norm1.weight" in weights:
        x = x + attention(layer_norm(a * x, f"blocks.{block}.norm1"), f"blocks.{block}.attn") / a
        hidden = functional.gelu(linear(layer_norm(a * x, f"blocks.{block}.norm2"), f"blocks.{block}.mlp.fc1"))
        x = x + linear(hidden, f"blocks.{block}.mlp.fc2") / a
        block += 1
    return linear(layer_norm(x, "norm")[:, 0], "head")
