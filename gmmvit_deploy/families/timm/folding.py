"""Folding passes for networks of timm: two heads of a distilled model as one map, and BatchNorm in convolutions."""

from __future__ import annotations

import copy
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.layers.roles import with_role
from gmmvit_deploy.layers.subclasses import replace_methods

_DISTILLED = ("VisionTransformerDistilled", "PoolingVisionTransformer")

__all__ = ["JoinedHeads", "fuse_batch_norms", "join_distilled_heads", "joined_forward_head"]


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


@torch.no_grad()
def join_distilled_heads(model: nn.Module) -> tuple[str, ...]:
    """Replace the two heads of a distilled DeiT or PiT by one linear map of the class and the distillation token.

    Ensures: in float64 the logits are equal up to rounding.
    Errors: FoldError when the logits differ.
    """
    network: Any = getattr(model, "network", None)
    head, head_dist = getattr(network, "head", None), getattr(network, "head_dist", None)
    if (
        type(network).__name__ not in _DISTILLED
        or not isinstance(head, nn.Linear)
        or not isinstance(head_dist, nn.Linear)
    ):
        return ()
    joined = JoinedHeads(head, head_dist)
    tokens = torch.randn(3, 2, head.in_features, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    first, second = (copy.deepcopy(linear).double() for linear in (head, head_dist))
    expected = (first(tokens[:, 0]) + second(tokens[:, 1])) / 2
    if not torch.allclose(copy.deepcopy(joined).double()(tokens), expected, rtol=1e-6, atol=1e-6):
        raise FoldError("join_distilled_heads changed the logits by more than rounding")
    network.head, network.head_dist = joined, nn.Identity()
    replace_methods(network, joined_forward_head)
    return ("network.head", "network.head_dist")


def joined_forward_head(original: type) -> dict[str, Any]:
    """Return a ``forward_head`` that gives the class and the distillation token to `JoinedHeads`."""

    def forward_head(self: Any, x: Tensor, pre_logits: bool = False) -> Tensor:
        logits: Tensor = self.head(x[:, :2])
        return logits

    return {"forward_head": forward_head}


@torch.no_grad()
def fuse_batch_norms(model: nn.Module) -> tuple[str, ...]:
    """Merge each BatchNorm of torchvision's convolution stem into the convolution before it.

    W' = W·γ/√(v+ε),  b' = (b−m)·γ/√(v+ε) + β

    The exporter merges the BatchNorms of other networks.
    Returns the names of the changed convolutions.
    """
    from gmmvit_deploy.families.timm.conv_stem import ConvStem

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
