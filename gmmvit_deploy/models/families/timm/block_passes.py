"""Folding passes for the blocks of timm's vision transformers.

    γ ∘ (W x + b)              →  (γ ∘ W) x + γ ∘ b            LayerScale merged into the linear map before it
    x + mlp(norm(x))           →  in the last block, computed only for the prefix tokens, such as the class token

The modules belong to timm, so each pass is tried on a copy: if the logits of random images change by more than
rounding, the pass leaves the network as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.layers.subclasses import replace_methods
from gmmvit_deploy.models.layers.tried_change import tried

__all__ = ["merge_linear_layer_scale", "narrow_class_token_block", "narrowed_forward"]


@torch.no_grad()
def merge_linear_layer_scale(model: Model) -> tuple[str, ...]:
    """Merge LayerScale into the output projection of each attention and the second linear layer of each mlp.

    Ensures: in float64 the logits of random images are equal up to rounding; otherwise the network does not change.
    Returns the names of the changed layers.
    """
    return tried(model, _merge)


@torch.no_grad()
def narrow_class_token_block(model: Model) -> tuple[str, ...]:
    """Compute the mlp of the last block only for the prefix tokens: class token, distillation token and registers.

    Requires: a vision transformer of timm whose head reads no patches, without attention pooling and without a linear
    head of DINO.
    Ensures: in float64 the logits of random images are equal up to rounding; otherwise the network does not change.
    Returns the name of the block.
    """
    return tried(model, _narrow)


def _merge(model: Any) -> tuple[str, ...]:
    changed = []
    for path, block in model.network.named_modules():
        for scale_name, part_name, layer_name in (("ls1", "attn", "proj"), ("ls2", "mlp", "fc2")):
            scale, part = getattr(block, scale_name, None), getattr(block, part_name, None)
            layer, gamma = getattr(part, layer_name, None), getattr(scale, "gamma", None)
            if (
                not isinstance(layer, nn.Linear)
                or not isinstance(gamma, Tensor)
                or gamma.shape != (layer.out_features,)
            ):
                continue
            layer.weight.mul_(gamma[:, None])
            if layer.bias is not None:
                layer.bias.mul_(gamma)
            setattr(block, scale_name, nn.Identity())
            changed.append(f"network.{path}.{part_name}.{layer_name}")
    return tuple(changed)


def _narrow(model: Any) -> tuple[str, ...]:
    network = model.network
    blocks = getattr(network, "blocks", None)
    tokens = getattr(network, "num_prefix_tokens", 0)
    reads_prefix = getattr(network, "global_pool", "") == "token" and getattr(network, "attn_pool", None) is None
    if model.linear_head is not None or not reads_prefix or not tokens or not isinstance(blocks, nn.Sequential):
        return ()
    parts = ("norm1", "attn", "ls1", "drop_path1", "norm2", "mlp", "ls2", "drop_path2")
    if not len(blocks) or not all(hasattr(blocks[-1], part) for part in parts) or blocks[-1].training:
        return ()
    if type(blocks[-1]).__name__ != "Block":
        return ()
    replace_methods(blocks[-1], narrowed_forward, str(tokens))
    return (f"network.blocks.{len(blocks) - 1}",)


def narrowed_forward(original: type, tokens: str) -> dict[str, Any]:
    """Return a forward of timm's ``Block`` that outputs only the first ``tokens`` tokens."""

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x), *args, **kwargs)))
        x = x[:, : int(tokens)]
        out: Tensor = x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))
        return out

    return {"forward": forward}
