"""Folding passes for networks of timm.

    (W x + b + W_d x_d + b_d) / 2  →  W' [x, x_d] + b'            the heads of a distilled model
    BatchNorm behind W ∗ x         →  W' ∗ x + b'                 torchvision's convolution stem
    γ ∘ (W x + b)                  →  (γ ∘ W) x + γ ∘ b           LayerScale merged into the linear map before it
    x + mlp(norm(x))               →  in the last block, computed only for the prefix tokens, such as the class token

The modules belong to timm, so each pass on them is `tried` on a copy.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.models.layers.fused_call import replace_methods
from gmmvit_deploy.models.layers.proofs import merge_factor, random_values, tried
from gmmvit_deploy.models.layers.roles import with_role

_TWO_TOKENS = ("VisionTransformerDistilled", "PoolingVisionTransformer")
_ONE_VECTOR = ("LevitDistilled",)


class JoinedHeads(nn.Module):
    """The average of two linear heads on two tokens, as a single linear map of both tokens.

    (W x + b + W_d x_d + b_d) / 2  =  [W, W_d]/2 · [x, x_d] + (b + b_d)/2
    """

    operator_roles: ClassVar[dict[str, Any]] = {}

    def __init__(self, head: nn.Linear, head_dist: nn.Linear) -> None:
        super().__init__()
        weight = torch.cat([head.weight, head_dist.weight], dim=1) / 2
        bias = (head.bias + head_dist.bias) / 2
        self.linear = with_role(nn.Linear(weight.shape[1], weight.shape[0], dtype=weight.dtype), "head")
        self.linear.weight.data, self.linear.bias.data = weight, bias
        self.linear.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits (B, C) for the class and the distillation token (B, 2, D)."""
        logits: Tensor = self.linear(tokens.flatten(1))
        return logits


@tried
def join_distilled_heads(model: Any) -> tuple[str, ...]:
    """Replace the two heads of a distilled model by one linear map.

    DeiT, PiT:  (W x + b + W_d x_d + b_d) / 2, of class token x and distillation token x_d  →  `JoinedHeads`
    LeViT:      (W n(x) + b + W_d n_d(x) + b_d) / 2, with BatchNorms n and n_d of one vector x  →  W' x + b'

    Ensures: in float64 the heads and the linear map output the same logits up to rounding.
    Errors: FoldError when the logits differ.
    """
    network = model.network
    heads: list[Any] = [getattr(network, name, None) for name in ("head", "head_dist")]
    if type(network).__name__ in _TWO_TOKENS and all(isinstance(head, nn.Linear) for head in heads):
        joined: nn.Module = JoinedHeads(*heads)
        tokens = random_values(3, 2, heads[0].in_features)
        parts, methods = tokens.unbind(1), joined_forward_head
    elif type(network).__name__ in _ONE_VECTOR and all(hasattr(head, "fuse") for head in heads):
        linear = _averaged(*(copy.deepcopy(head).fuse() for head in heads))
        joined, tokens = linear, random_values(3, linear.in_features)
        parts, methods = (tokens, tokens), pooled_forward_head
    else:
        return ()
    trained = torch.stack([copy.deepcopy(head).double()(part) for head, part in zip(heads, parts, strict=True)])
    largest = float((copy.deepcopy(joined).double()(tokens) - trained.mean(0)).abs().max())
    if not largest <= 1e-6 * max(float(trained.abs().max()), 1.0):  # the joined weights are rounded to float32
        raise FoldError(f"join_distilled_heads changed the logits by {largest:.2e}; expected only rounding")
    network.head, network.head_dist = joined, nn.Identity()
    replace_methods(network, methods)
    return ("network.head", "network.head_dist")


def _averaged(head: nn.Linear, head_dist: nn.Linear) -> nn.Linear:
    """Return the average of two linear maps of the same vector."""
    linear = with_role(nn.Linear(head.in_features, head.out_features), "head").requires_grad_(False)
    linear.weight.copy_((head.weight + head_dist.weight) / 2)
    linear.bias.copy_((head.bias + head_dist.bias) / 2)
    return linear


def joined_forward_head(original: type) -> dict[str, Any]:
    """Return a ``forward_head`` that gives the class and the distillation token to `JoinedHeads`."""

    def forward_head(self: Any, x: Tensor, pre_logits: bool = False) -> Tensor:
        logits: Tensor = self.head(x[:, :2])
        return logits

    return {"forward_head": forward_head}


def pooled_forward_head(original: type) -> dict[str, Any]:
    """Return a ``forward_head`` of LeViT that gives the pooled vector to one linear map."""

    def forward_head(self: Any, x: Tensor, pre_logits: bool = False) -> Tensor:
        if self.global_pool == "avg":
            x = x.mean(dim=(-2, -1)) if self.use_conv else x.mean(dim=1)
        answer: Tensor = x if pre_logits else self.head(x)
        return answer

    return {"forward_head": forward_head}


@torch.no_grad()
def fuse_batch_norms(model: nn.Module) -> tuple[str, ...]:
    """Merge each BatchNorm of torchvision's convolution stem into its convolution; the exporter merges all others.

    W' = W·γ/√(v+ε),  b' = (b−m)·γ/√(v+ε) + β
    """
    from gmmvit_deploy.models.families.timm.conv_stem import ConvStem

    changed = []
    for name, module in model.named_modules():
        if isinstance(module, ConvStem):
            for index, norm in enumerate(module.norms):
                if isinstance(norm, nn.BatchNorm2d):
                    convolution = cast("nn.Conv2d", module.convolutions[index])
                    module.convolutions[index] = fuse_conv_bn_eval(convolution, norm)
                    module.norms[index] = nn.Identity()
                    changed.append(f"{name}.convolutions.{index}")
    return tuple(changed)


@tried
def merge_linear_layer_scale(model: Any) -> tuple[str, ...]:
    """Merge LayerScale into the output projection of each attention and the second linear layer of each mlp."""
    changed = []
    for path, block in model.network.named_modules():
        for scale_name, part_name, layer_name in (("ls1", "attn", "proj"), ("ls2", "mlp", "fc2")):
            scale, part = getattr(block, scale_name, None), getattr(block, part_name, None)
            if merge_factor(getattr(part, layer_name, None), getattr(scale, "gamma", None)):
                setattr(block, scale_name, nn.Identity())
                changed.append(f"network.{path}.{part_name}.{layer_name}")
    return tuple(changed)


@tried
def narrow_class_token_block(model: Any) -> tuple[str, ...]:
    """Compute the mlp of the last block only for the prefix tokens: class token, distillation token and registers.

    For a vision transformer of timm whose head reads no patches, without attention pooling and linear head of DINO.
    """
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
