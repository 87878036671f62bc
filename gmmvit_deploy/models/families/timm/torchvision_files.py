"""Checkpoints of torchvision's ``VisionTransformer``: how the spec is inferred, and the names of the tensors.

class_token                                     (1, 1, D)
conv_proj                                       the patch convolution, or with a convolution stem:
conv_proj.conv_bn_relu_{i}.0, .1                convolution without bias, BatchNorm
conv_proj.conv_last                             1×1 convolution
encoder.pos_embedding                           (1, n+1, D)
encoder.layers.encoder_layer_{i}                ln_1, self_attention.in_proj_weight (3D, D), ln_2, mlp.0, mlp.3
encoder.ln, heads.head                          last norm, linear map to the logits
heads.pre_logits                                with representation_size: linear layer, and tanh, before heads.head

The file determines everything but the number of heads and the strides of a convolution stem.
"""

from __future__ import annotations

import math
from typing import Any

from gmmvit_deploy.errors import CheckpointError
from gmmvit_deploy.models.families.timm.spec import CONV_STEM_VIT, TimmSpec
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.models.sources.shapes import Shapes
from gmmvit_deploy.models.sources.source import CheckpointSource, renamed, within
from gmmvit_deploy.models.specs import MaskSpec

_STEM = r"conv_proj\.conv_bn_relu_(\d+)\."
_LAYER = r"encoder\.layers\.encoder_layer_(\d+)\."
_EXAMPLE = (
    f"type --model {CONV_STEM_VIT} --model-args "
    """'{"num_heads": 2, "conv_stem_strides": [2, 1, 2, 1]}' with the values of training"""
)
_TYPED = ("num_heads", "conv_stem_strides")
_IN_BLOCK = {
    "norm1": "ln_1",
    "attn.qkv.weight": "self_attention.in_proj_weight",
    "attn.qkv.bias": "self_attention.in_proj_bias",
    "attn.proj": "self_attention.out_proj",
    "attn": "self_attention",
    "norm2": "ln_2",
    "mlp.fc1": "mlp.0",
    "mlp.fc2": "mlp.3",
}
_NAMES = {
    "network.patch_embed.convolutions.{}": "conv_proj.conv_bn_relu_{}.0",
    "network.patch_embed.norms.{}": "conv_proj.conv_bn_relu_{}.1",
    "network.patch_embed.last": "conv_proj.conv_last",
    "network.patch_embed.proj": "conv_proj",
    "network.cls_token": "class_token",
    "network.pos_embed": "encoder.pos_embedding",
    **within("network.blocks.{}", "encoder.layers.encoder_layer_{}", _IN_BLOCK),
    "network.norm": "encoder.ln",
    "network.fc_norm.pre_logits": "heads.pre_logits",
    "network.head": "heads.head",
}


def infer_spec(shapes: Shapes, hints: LoadHints) -> TimmSpec:
    source = shapes.source
    if unknown := set(hints.model_args) - set(_TYPED):
        raise CheckpointError(
            f"{source}: --model-args: expected only {' and '.join(_TYPED)} for {CONV_STEM_VIT}, got "
            f"{', '.join(sorted(unknown))}; the tensors determine all other values",
            hint=_EXAMPLE,
        )
    dim = shapes.of("class_token", rank=3)[2]
    heads = hints.model_args.get("num_heads", hints.heads)
    if not isinstance(heads, int) or heads < 1 or dim % heads:
        raise CheckpointError(
            f"{source}: no tensor of this file shows the number of attention heads; expected num_heads that divides "
            f"the width {dim}, got {heads!r}",
            hint=_EXAMPLE,
        )
    tokens = shapes.of("encoder.pos_embedding", rank=3)[1]
    grid = shapes.grid(tokens - 1, where="encoder.pos_embedding, without the class token,")
    model_args: dict[str, Any] = {"embed_dim": dim, "num_heads": heads, "depth": shapes.count(_LAYER)}
    model_args["mlp_dim"] = shapes.of("encoder.layers.encoder_layer_0.mlp.0.weight", rank=2)[0]
    if shapes.count(_STEM):
        model_args["stem"], channels = _stem(shapes, hints)
        side = grid * math.prod(stride for _, _, stride in model_args["stem"])
    else:
        _, patch, channels = shapes.convolution_patch("conv_proj.weight")
        model_args["patch_size"] = patch
        side = grid * patch
    classes = shapes.of("heads.head.weight", rank=2)[0]
    if "heads.pre_logits.weight" in shapes:
        model_args["representation_size"] = shapes.of("heads.pre_logits.weight", rank=2)[0]
    return TimmSpec(
        architecture=CONV_STEM_VIT,
        model_args={**model_args, "img_size": [side, side], "in_chans": channels, "num_classes": classes},
        image_size=side,
        channels=channels,
        classes=classes,
        mask=MaskSpec(),
    )


def _stem(shapes: Shapes, hints: LoadHints) -> tuple[list[list[int]], int]:
    """Return ([output channels, kernel size, stride] of each convolution, number of image channels)."""
    count = shapes.count(_STEM)
    strides = hints.model_args.get("conv_stem_strides")
    # torchvision's last convolution, a 1×1 convolution of stride 1, may be counted or not.
    if isinstance(strides, list) and len(strides) == count + 1 and strides[-1] == 1:
        strides = strides[:-1]
    whole = isinstance(strides, list) and all(isinstance(stride, int) and stride >= 1 for stride in strides)
    if not isinstance(strides, list) or not whole or len(strides) != count:
        raise CheckpointError(
            f"{shapes.source}: no tensor of this file shows the strides of the convolution stem; expected "
            f"conv_stem_strides with a number for each of the {count} convolutions, got {strides!r}",
            hint=_EXAMPLE,
        )
    stem, channels = [], 0
    for index, stride in enumerate(strides):
        out, given, kernel, _ = shapes.of(f"conv_proj.conv_bn_relu_{index}.0.weight", rank=4)
        channels = channels or given
        stem.append([out, kernel, stride])
    return stem, channels


TORCHVISION_FILES = CheckpointSource(
    name="torchvision's VisionTransformer",
    signature=(r"class_token$", r"conv_proj\.", _LAYER),
    spec=infer_spec,
    tensors=lambda spec, names: renamed(names, _NAMES),
    interpolation=lambda shapes, hints: "torchvision",
    own_hints=("model_args",),
)
