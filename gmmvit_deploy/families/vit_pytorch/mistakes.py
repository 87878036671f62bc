"""Usual mistakes in a network of vit-pytorch.  The steps on the attention scores have mistakes of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gmmvit_deploy.families.family import Mistake

if TYPE_CHECKING:
    from gmmvit_deploy.layers.model import Model

__all__ = ["MISTAKES"]


def _other_pooling(model: Model) -> bool:
    from gmmvit_deploy.families.vit_pytorch.model import VitPytorch

    if not isinstance(model, VitPytorch) or model.class_token is None:
        return False
    model.pools = "mean" if model.pools == "cls" else "cls"
    return True


def _channel_first(model: Model) -> bool:
    """Reorder the weights, so that the model computes what a network on patches in the order (c, p, p) computes."""
    import torch
    from torch import nn

    from gmmvit_deploy.layers.blocks import PatchEmbedding

    embedding = model.get_submodule("patch_embedding")
    if not isinstance(embedding, PatchEmbedding):
        return False
    side = embedding.patch_size
    channels = embedding.project.in_features // side**2
    if channels == 1 or side == 1:
        return False
    order = torch.arange(embedding.project.in_features).reshape(channels, side, side).permute(1, 2, 0).flatten()
    with torch.no_grad():
        embedding.project.weight.copy_(embedding.project.weight[:, order].clone())
        norm = getattr(embedding, "patch_norm", None)
        if isinstance(norm, nn.LayerNorm):
            norm.weight.copy_(norm.weight[order].clone())
            norm.bias.copy_(norm.bias[order].clone())
    return True


def _mixing_transposed(model: Model) -> bool:
    import torch

    from gmmvit_deploy.scores.heads import HeadMixing

    weights = [step.weight for step in model.modules() if isinstance(step, HeadMixing)]
    with torch.no_grad():
        for weight in weights:
            weight.copy_(weight.transpose(0, 1).clone())
    return bool(weights)


MISTAKES: tuple[Mistake, ...] = (
    ("class token and mean of the tokens exchanged in the pooling", _other_pooling),
    ("the head mixing transposed", _mixing_transposed),
    ("patches flattened with the channel first", _channel_first),
)
