"""Models of timm's architectures with random weights for which every attention matters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from gmmvit_deploy.models.families.timm.network import require_timm
from gmmvit_deploy.models.families.timm.spec import CONV_STEM_VIT
from gmmvit_deploy.models.sources.hints import LoadHints
from tests.uneven_attention import perturbed

CLASSES = 10
_STEM = ((24, 2), (48, 2), (96, 2), (192, 2))  # (channels, stride) of the convolutions of 3×3


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """An architecture of timm.

    gain: factor of the weights in `perturbed`, for networks whose convolutions would weaken the attention.
    """

    size: int
    gain: float = 1.0
    args: Mapping[str, Any] = field(default_factory=dict)

    def hints(self, name: str) -> LoadHints:
        """Return the options with which a user exports a state dict of this architecture."""
        args = dict(self.args)
        if name == CONV_STEM_VIT:
            args = {"num_heads": 3, "conv_stem_strides": [stride for _, stride in _STEM]}
        return LoadHints(model=name, model_args=args, image_size=self.size)


ARCHITECTURES: dict[str, Architecture] = {
    "vit_tiny_patch16_224": Architecture(size=224),
    "vit_small_patch16_224": Architecture(size=224),
    "deit_tiny_distilled_patch16_224": Architecture(size=224),
    "deit3_small_patch16_224": Architecture(size=224),
    "cait_xxs24_224": Architecture(size=224),
    "swin_tiny_patch4_window7_224": Architecture(size=224),
    "swinv2_tiny_window8_256": Architecture(size=256),
    "pit_ti_224": Architecture(size=224),
    "pit_ti_distilled_224": Architecture(size=224),
    "beit_base_patch16_224": Architecture(size=224, args={"depth": 4}),
    "eva02_tiny_patch14_224": Architecture(size=224),
    "vit_small_patch14_dinov2": Architecture(size=126, args={"img_size": 126}),
    "vit_medium_patch16_reg4_gap_256": Architecture(size=256),
    "xcit_nano_12_p16_224": Architecture(size=224),
    "maxvit_nano_rw_256": Architecture(size=256),
    "mobilevit_xxs": Architecture(size=256, gain=1.3),
    "convnext_atto": Architecture(size=224),
    "resnet18": Architecture(size=224),
    "vit_base_patch16_siglip_224": Architecture(size=224),
    "vit_relpos_small_patch16_224": Architecture(size=224),
    "vit_small_patch16_dinov3": Architecture(size=256, args={"img_size": 256}),
    "convit_tiny": Architecture(size=224),
    "levit_128s": Architecture(size=224, gain=1.152),
    "test_vit3": Architecture(size=160),
    CONV_STEM_VIT: Architecture(size=224),
    "hiera_tiny_224": Architecture(size=224),
}
"""timm's name of an architecture, or `CONV_STEM_VIT` → the size of its images and its arguments."""


def network_of(name: str, architecture: Architecture) -> nn.Module:
    """Build a network with the weights of `perturbed`: with timm, or with torchvision for `CONV_STEM_VIT`."""
    torch.manual_seed(0)
    if name == CONV_STEM_VIT:
        from torchvision.models.vision_transformer import ConvStemConfig, VisionTransformer

        network: nn.Module = VisionTransformer(
            image_size=architecture.size,
            patch_size=math.prod(stride for _, stride in _STEM),
            num_layers=4,
            num_heads=3,
            hidden_dim=192,
            mlp_dim=768,
            num_classes=CLASSES,
            conv_stem_configs=[ConvStemConfig(out_channels=c, kernel_size=3, stride=s) for c, s in _STEM],
        )
    else:
        network = require_timm().create_model(name, pretrained=False, num_classes=CLASSES, **architecture.args)
    return perturbed(network.eval(), architecture.gain)
