"""torchvision's vision transformer, with or without a convolution stem, built from timm's modules.

stem:      [3×3 convolution without bias, BatchNorm, ReLU] for each entry of ``stem``, then a 1×1 convolution
ViT:       class token, learned positions, pre-norm blocks, norm, head on the class token
head:      linear; with ``representation_size``, a linear layer to this width and tanh before it

torchvision's own class computes attention with ``torch.nn.MultiheadAttention``, in which this package cannot replace
the fused attention function (`layers.fused_call`). The tensors are the same under other names:
`families.timm.torchvision_files` maps the names.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

_BATCH_NORM_EPS = 1e-5
_LAYER_NORM_EPS = 1e-6


class ConvStem(nn.Module):
    """Convolutions from images (B, c, height, width) to tokens (B, rows · columns, D).

    stem: (output channels, kernel size, stride) of each convolution.
    """

    def __init__(self, channels: int, stem: list[list[int]], dim: int, image_size: tuple[int, int]) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList()
        self.norms = nn.ModuleList()
        for out, kernel, stride in stem:
            self.convolutions.append(nn.Conv2d(channels, out, kernel, stride, padding=(kernel - 1) // 2, bias=False))
            self.norms.append(nn.BatchNorm2d(out, eps=_BATCH_NORM_EPS))
            channels = out
        self.last = nn.Conv2d(channels, dim, 1)
        self.img_size = image_size
        side = math.prod(stride for _, _, stride in stem)
        self.grid_size = (image_size[0] // side, image_size[1] // side)
        self.num_patches = self.grid_size[0] * self.grid_size[1]

    def forward(self, images: Tensor) -> Tensor:
        x = images
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = torch.relu(norm(convolution(x)))
        tokens: Tensor = self.last(x).flatten(2).transpose(1, 2)
        return tokens


def conv_stem_vit(model_args: Mapping[str, Any]) -> nn.Module:
    """Build torchvision's vision transformer.

    model_args: ``img_size`` [height, width], ``in_chans``, ``num_classes``, ``embed_dim``, ``depth``, ``num_heads``,
    ``mlp_dim``, and ``stem`` (as in `ConvStem`) or ``patch_size`` for a stem of a single convolution; optional
    ``representation_size``.
    """
    from timm.models.vision_transformer import VisionTransformer

    height, width = model_args["img_size"]
    stem = model_args.get("stem")
    # With a stem, a patch embedding with the right grid stands in until the convolution stem replaces it.
    side = math.prod(stride for _, _, stride in stem) if stem else model_args.get("patch_size", 1)

    def norm(dim: int, **kwargs: Any) -> nn.LayerNorm:
        return nn.LayerNorm(dim, eps=_LAYER_NORM_EPS, **kwargs)

    network: nn.Module = VisionTransformer(
        img_size=(height, width),
        in_chans=model_args["in_chans"],
        num_classes=model_args["num_classes"],
        embed_dim=model_args["embed_dim"],
        depth=model_args["depth"],
        num_heads=model_args["num_heads"],
        mlp_ratio=model_args["mlp_dim"] / model_args["embed_dim"],
        norm_layer=norm,
        patch_size=side,
    )
    if stem:
        network.patch_embed = ConvStem(model_args["in_chans"], stem, model_args["embed_dim"], (height, width))
    if hidden := model_args.get("representation_size"):
        # timm applies fc_norm to the class token, directly before the head.
        network.fc_norm = nn.Sequential(
            OrderedDict(pre_logits=nn.Linear(model_args["embed_dim"], hidden), act=nn.Tanh())
        )
        network.head = nn.Linear(hidden, model_args["num_classes"])
    return network
