"""Models of timm's architectures with random weights for which every attention matters.

A new model of timm is a poor test: its biases are zero, its LayerScale is almost zero, and its attention weights are
almost equal for all tokens. `perturbed` draws all weights anew. `attention_effects` measures how far the logits move
when the weights of a single attention are made equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gmmvit_deploy.families.timm.network import require_timm
from gmmvit_deploy.families.timm.spec import CONV_STEM_VIT
from gmmvit_deploy.sources.hints import LoadHints

__all__ = ["ARCHITECTURES", "CLASSES", "Architecture", "attention_effects", "network_of", "perturbed"]

CLASSES = 10
_SOFTMAX = (torch.softmax, Tensor.softmax, F.softmax)
_STEM = ((24, 2), (48, 2), (96, 2), (192, 2))  # (channels, stride) of the convolutions of 3×3


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """An architecture.

    size: the side of the images in pixels.  args: arguments of ``timm.create_model`` besides the number of classes.
    gain: factor of the weights in `perturbed`, for networks whose convolutions would otherwise weaken the attention.
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


@torch.no_grad()
def perturbed(network: nn.Module, gain: float = 1.0) -> nn.Module:
    """Draw all parameters and statistics of a network anew, such that the attention weights are uneven.

    matrices, convolutions       normal, with the variance gain² / (number of inputs)
    weights of norms             normal around 1, with the deviation 0.2
    LayerScale                   normal around 0.5, with the deviation 0.1
    CaiT's bias after softmax    normal, with the deviation 0.0005: the bias adds to every attention weight
    tables, tokens, positions    normal, with the deviation 0.5
    other parameters             the initial value, plus normal noise with the deviation 0.1
    statistics of BatchNorm      means as other parameters, variances uniform in [0.5, 1.5]
    """
    for name, parameter in network.named_parameters():
        noise = torch.randn_like(parameter)
        last = name.rpartition(".")[2]
        if (last.endswith("weight") and parameter.dim() > 1) or last in ("in_proj_weight", "qkv"):
            parameter.copy_(gain * noise / math.sqrt(parameter[0].numel()))
        elif last == "weight":
            parameter.copy_(1 + 0.2 * noise)
        elif last.startswith("gamma"):
            parameter.copy_(0.5 + 0.1 * noise)
        elif name.endswith("proj_w.bias"):
            parameter.copy_(0.0005 * noise)
        elif parameter.dim() > 1 and parameter.numel() > parameter.shape[0]:
            parameter.copy_(0.5 * noise)
        else:
            parameter.add_(0.1 * noise)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d | nn.BatchNorm1d):
            module.running_mean.add_(0.1 * torch.randn_like(module.running_mean))
            module.running_var.uniform_(0.5, 1.5)
    return network


@torch.inference_mode()
def attention_effects(model: nn.Module, images: Tensor) -> list[float]:
    """Return for each softmax of a model how far the logits move when all outputs of the softmax are equal.

    Equal attention weights remove the attention: each token then receives the mean of V over all tokens.
    The result is empty for a model without attention. A softmax of the attention's relative position, as in ConViT, is
    an entry of its own.
    """
    with _softmaxes_replaced(None) as count:
        logits = model(images)
    effects = []
    for index in range(len(count)):
        with _softmaxes_replaced(index):
            effects.append(float((model(images) - logits).abs().max()))
    return effects


@contextmanager
def _softmaxes_replaced(index: int | None) -> Iterator[list[int]]:
    """Make the outputs of softmax number ``index`` equal; yield a list that grows by an element for each softmax."""
    calls: list[int] = []

    class Replacing(TorchFunctionMode):
        def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            out = func(*args, **kwargs)
            if func in _SOFTMAX:
                if len(calls) == index:
                    out = torch.full_like(out, 1 / out.shape[kwargs.get("dim", args[1] if len(args) > 1 else -1)])
                calls.append(len(calls))
            return out

    with Replacing():
        yield calls
