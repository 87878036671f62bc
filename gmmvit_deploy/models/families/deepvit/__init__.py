"""DeepViT: a vision transformer with Re-attention, which mixes the heads of the attention weights.

Source: "DeepViT: Towards Deeper Vision Transformer" (arXiv 2103.11886), code zhoudaquan/dvit_repo, whose train.py is a
copy of timm's.

cls_token, pos_embed                     (1, 1, D), (1, N, D)
patch_embed.proj                         convolution; on the image, or on the output of the convolution stem
patch_embed.{conv1,bn1,conv2,bn2}        the convolution stem; absent without a stem
blocks.{i}.{norm1,norm2}, norm, head
blocks.{i}.attn.{qkv,proj}, blocks.{i}.mlp.{fc1,fc2}
blocks.{i}.attn.reatten_matrix           1×1 convolution (H, H, 1, 1) with bias, indexed [new head, old head]
blocks.{i}.attn.var_norm                 BatchNorm with a channel for each head

No tensor shows the scale adjustment, the transform scale, and, if no block has re-attention, the number of heads. They
come from an option, or from the preset that the file names. A wrong value raises no error, but gives other logits.

The authors' code builds a network without re-attention in two ways, whose files have the same tensors:
re_atten=False, which ignores the scale adjustment; or re_atten=True with apply_transform=False for every block, which
applies the scale adjustment. In every preset, some blocks have re-attention, so the user is asked for the value.

All presets have 12 heads, patches of 16 × 16 pixels and an mlp of width 3·D, with D the width of the tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from gmmvit_deploy.errors import CheckpointError
from gmmvit_deploy.models.families.family import Family, Network, last_of_blocks, plain_blocks
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.models.sources.record import KnownImages
from gmmvit_deploy.models.sources.shapes import Shapes, field_differences, infer_heads, recorded_preset
from gmmvit_deploy.models.sources.source import (
    BLOCK_OF_TIMM,
    CheckpointSource,
    Conversion,
    TensorOrigins,
    renamed,
    within,
)
from gmmvit_deploy.models.specs import MaskKind, MaskSpec, PatchSpec, require

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepViTSpec(PatchSpec):
    """DeepViT: a ViT with a class token whose blocks mix the heads of the attention weights (Re-attention).

    reattention: for each block, True if the block mixes its heads after softmax.
    stem_channels: the channels of the convolution stem; 0 if a single convolution embeds the patches.
    scale_adjustment: a, the factor before each norm of a block, by which the output of each branch is divided.
    transform_scale: True if the mixed weights are also multiplied by d^(−1/2), with d the head dim.
    """

    family: ClassVar[str] = "deepvit"
    mask_kinds: ClassVar[tuple[MaskKind, ...]] = ("plain",)
    reattention: tuple[bool, ...]
    stem_channels: int
    qkv_bias: bool
    scale_adjustment: float
    transform_scale: bool

    def __post_init__(self) -> None:
        PatchSpec.__post_init__(self)
        require(self.dim % self.heads == 0, f"heads: expected a divisor of the dim {self.dim}, got {self.heads}")
        require(
            len(self.reattention) == self.depth and all(isinstance(mixes, bool) for mixes in self.reattention),
            f"reattention: expected true or false for each of {self.depth} blocks, got {self.reattention!r}",
        )
        require(
            isinstance(self.stem_channels, int) and self.stem_channels >= 0,
            f"stem_channels: expected a whole number of at least 0, got {self.stem_channels!r}",
        )
        require(
            not self.stem_channels or self.patch_size % 2 == 0,
            f"patch size: expected an even number, because the convolution stem has stride 2, got {self.patch_size}",
        )
        require(
            isinstance(self.scale_adjustment, int | float) and 0 < self.scale_adjustment < math.inf,
            f"scale_adjustment: expected a number above 0, got {self.scale_adjustment!r}",
        )

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


def _spec(
    dim: int,
    depth: int,
    classes: int,
    image_size: int,
    mask: MaskSpec,
    *,
    mixed: int | None = None,
    transform_scale: bool = False,
) -> DeepViTSpec:
    """Return a preset.

    mixed: the number of last blocks with re-attention, in a network with a convolution stem; None for a network without
    a stem, in which every block has re-attention.
    """
    plain = 0 if mixed is None else depth - mixed
    return DeepViTSpec(
        image_size=image_size,
        patch_size=16,
        classes=classes,
        dim=dim,
        depth=depth,
        heads=12,
        mlp_dim=3 * dim,
        reattention=(False,) * plain + (True,) * (depth - plain),
        stem_channels=0 if mixed is None else 64,
        qkv_bias=True,
        scale_adjustment=1.0 if mixed is None else 0.5,
        transform_scale=transform_scale,
        mask=mask,
    )


PRESETS: Mapping[str, Callable[[int, int, MaskSpec], DeepViTSpec]] = {
    "deepvit_patch16_224_re_attn_16b": partial(_spec, 384, 16),
    "deepvit_patch16_224_re_attn_24b": partial(_spec, 384, 24),
    "deepvit_patch16_224_re_attn_32b": partial(_spec, 384, 32),
    "deepvit_S": partial(_spec, 396, 16, mixed=5, transform_scale=True),
    "deepvit_L": partial(_spec, 420, 32, mixed=12),
    "deepvit_L_384": partial(_spec, 420, 32, mixed=12),
}
IMAGE_SIZES: Mapping[str, int] = {name: 384 if name == "deepvit_L_384" else 224 for name in PRESETS}
"""Preset → the side of the images in pixels with which the authors' code trains the preset."""


_STEM = "patch_embed.conv1.weight"
_NOT_COMPARED = {"classes", "mask", "heads", "scale_adjustment", "transform_scale"}
"""Fields of a spec that are no sizes of a preset: a network is often trained again for other classes."""
_SETTINGS = ("mean", "std", "crop_pct", "interpolation")


def hidden_values(shapes: Shapes, hints: LoadHints, spec: DeepViTSpec, *, known_heads: int | None) -> dict[str, Any]:
    """Return field of the spec → value that no tensor shows.

    spec: the sizes that the tensors show; the other values are not read.
    known_heads: the number of heads that the tensors show, which is among the values, or None.
    """
    mixes = any(spec.reattention)
    if hints.transform_scale is not None and not mixes:
        option = "--set transform_scale=yes" if hints.transform_scale else "--set transform_scale=no"
        does = "multiplies" if hints.transform_scale else "keeps"
        raise CheckpointError(
            f"{shapes.source}: {option} {does} the mixed weights, but no block of this file mixes heads",
            hint=f"omit {option}",
        )
    preset, origin = _usable_preset(shapes, hints, spec, known_heads)
    given: dict[str, Any] = {
        "heads": known_heads if known_heads is not None else hints.heads,
        "scale_adjustment": hints.scale_adjustment,
        "transform_scale": hints.transform_scale if mixes else False,
    }
    missing = [field for field, value in given.items() if value is None]
    if missing and preset is None:
        raise _asked(shapes, missing, origin, mixes=mixes)
    if preset is None:
        return given
    shapes.taken_from |= dict.fromkeys(missing, origin)
    return given | {field: getattr(preset, field) for field in missing}


def _asked(shapes: Shapes, missing: list[str], why_not: str, *, mixes: bool) -> CheckpointError:
    words = {
        "heads": "the number of heads",
        "scale_adjustment": "the scale adjustment",
        "transform_scale": "the transform scale",
    }
    options = {
        "heads": "--set heads=N",
        "scale_adjustment": "--set scale_adjustment=NUMBER (in the presets 1, but 0.5 in deepvit_S and deepvit_L)"
        if mixes
        else "--set scale_adjustment=NUMBER (1 if training built the network with re_atten=False, because the authors' "
        "code then ignores the value of the training)",
        "transform_scale": "--set transform_scale=yes (as in deepvit_S) or --set transform_scale=no (as in the other "
        "presets)",
    }
    return CheckpointError(
        f"{shapes.source}: no tensor of this file shows {' and '.join(words[field] for field in missing)} of a "
        f"DeepViT{why_not}",
        hint=f"type {' and '.join(options[field] for field in missing)} with the values of the training; a wrong value "
        "raises no error, but the predictions are wrong",
    )


def _usable_preset(
    shapes: Shapes, hints: LoadHints, spec: DeepViTSpec, known_heads: int | None
) -> tuple[DeepViTSpec | None, str]:
    """Return the preset of ``--preset``, or else as `recorded_preset`."""
    if hints.preset is not None:
        chosen = PRESETS[hints.preset](spec.classes, spec.image_size, MaskSpec())
        return chosen, f"the preset {hints.preset}, which --preset names"

    def preset_named(name: str) -> DeepViTSpec | None:
        return PRESETS[name](spec.classes, IMAGE_SIZES[name], MaskSpec()) if name in PRESETS else None

    def differences(preset: DeepViTSpec) -> list[str]:
        differing = field_differences(spec, preset, left_out=_NOT_COMPARED)
        differing = ["re-attention in other blocks" if d.startswith("reattention") else d for d in differing]
        if known_heads is not None and known_heads != preset.heads:
            differing.append(f"heads {known_heads} (the preset has {preset.heads})")
        return differing

    return recorded_preset(shapes, preset_named=preset_named, differences=differences)


def known_images(shapes: Shapes, hints: LoadHints, spec: DeepViTSpec) -> KnownImages:
    """Return the preprocessing of the preset that the file names, unless training set another one.

    Source: ``default_cfgs`` of the authors' code, which its train.py uses if mean, std, crop and filter are not given.
    """
    preset, origin = _usable_preset(shapes, replace(hints, preset=None), spec, spec.heads)
    if preset is None or not shapes.record.args or any(shapes.record.args.get(name) for name in _SETTINGS):
        return KnownImages()
    half = (0.5,) * spec.channels
    return KnownImages(
        mean=half,
        std=half,
        resize="center-bicubic",
        crop_pct=1.0 if preset.image_size == 384 else 0.9,
        origins=dict.fromkeys(("mean", "std", "resize", "crop_pct"), origin),
    )


def tensor_origins(spec: DeepViTSpec, names: Iterable[str]) -> TensorOrigins:
    after, attention = "blocks.{}.attention.scores.after", "blocks.{}.attn"
    table: dict[str, str | Conversion] = {
        **{f"stem.convolutions.{i}": f"patch_embed.conv{i + 1}" for i in range(2)},
        **{f"stem.norms.{i}": f"patch_embed.bn{i + 1}" for i in range(2)},
        "patch_embedding": "patch_embed.proj",
        "class_token": "cls_token",
        "position_embedding": "pos_embed",
        **within("blocks.{}", "blocks.{}", BLOCK_OF_TIMM),
        f"{after}.mixing": Conversion(keys=(f"{attention}.reatten_matrix",), convert=_from_old_to_new),
        f"{after}.bias": f"{attention}.reatten_matrix",
        f"{after}.norm": f"{attention}.var_norm",
        "head_norm": "norm",
        "head": "head",
    }
    return renamed(names, table)


def _from_old_to_new(weight: Tensor) -> Tensor:
    """Turn the weight of the 1×1 convolution, [new head, old head, 1, 1], into [old head, new head]."""
    if weight.shape[2:] != (1, 1):
        raise ValueError("expected (H, H, 1, 1) for H heads")
    return weight[:, :, 0, 0].transpose(0, 1).contiguous()


def infer_spec(shapes: Shapes, hints: LoadHints) -> DeepViTSpec:
    dim, patch_size, channels, stem_channels = _embedding(shapes)
    positions = shapes.of("pos_embed", rank=3)[1] - 1
    grid = shapes.grid(positions, where="pos_embed without the class token")
    classes = shapes.of("head.weight", rank=2)[0]
    depth = shapes.count(r"blocks\.(\d+)\.")
    mixing = [f"blocks.{i}.attn.reatten_matrix.weight" for i in range(depth)]
    reattention = tuple(name in shapes for name in mixing)
    known = next((shapes.of(name, rank=4)[0] for name in mixing if name in shapes), None)
    inner = shapes.of("blocks.0.attn.qkv.weight", rank=2)[0] // 3
    sizes = DeepViTSpec(
        image_size=grid * patch_size,
        patch_size=patch_size,
        classes=classes,
        dim=dim,
        depth=depth,
        heads=1,
        mlp_dim=shapes.of("blocks.0.mlp.fc1.weight", rank=2)[0],
        reattention=reattention,
        stem_channels=stem_channels,
        qkv_bias="blocks.0.attn.qkv.bias" in shapes,
        scale_adjustment=1.0,
        transform_scale=False,
        mask=MaskSpec(),
        channels=channels,
    )
    hidden = hidden_values(shapes, hints, sizes, known_heads=known)
    evidence = "the number of heads in the head mixing matrices of the file is"
    heads = infer_heads(shapes, hints, width=inner, shown=(hidden["heads"], evidence), presets=PRESETS)
    return replace(sizes, **hidden | {"heads": heads})


def _embedding(shapes: Shapes) -> tuple[int, int, int, int]:
    """Return (D, patch size, image channels, channels of the stem) of the patch embedding; 0 without a stem."""
    dim, side, channels = shapes.convolution_patch("patch_embed.proj.weight")
    if _STEM not in shapes:
        return dim, side, channels, 0
    return dim, 2 * side, shapes.of(_STEM, rank=4)[1], channels


RELEASED = CheckpointSource(
    name="the DeepViT authors' code",
    signature=(
        r"patch_embed\.proj\.weight$",
        r"blocks\.\d+\.attn\.qkv\.weight$",
        r"blocks\.\d+\.attn\.reatten_matrix\.",
    ),
    spec=infer_spec,
    tensors=tensor_origins,
    known_unused=lambda spec: {r".+\.num_batches_tracked": "the number of training steps of a BatchNorm"},
    images=known_images,
    own_hints=("scale_adjustment", "transform_scale"),
)
"""Files with re-attention in any block."""

WITHOUT_REATTENTION = replace(
    RELEASED,
    name="the DeepViT authors' code, without re-attention",
    signature=(r"patch_embed\.proj\.weight$", r"blocks\.\d+\.attn\.qkv\.weight$", r"patch_embed\.conv2\.weight$"),
    absent=(r"blocks\.\d+\.attn\.reatten_matrix\.",),
)
"""Files with the convolution stem and without re-attention.  A file with neither has the names of a ViT of timm."""


def _network() -> Network:
    from gmmvit_deploy.models.families.deepvit import folding
    from gmmvit_deploy.models.families.deepvit.mistakes import MISTAKES
    from gmmvit_deploy.models.families.deepvit.model import DeepViT

    return Network(
        build=DeepViT,
        folding_passes=(folding.merge_head_norm, folding.merge_scale_adjustment, folding.merge_stem_norms),
        mistakes=MISTAKES,
    )


def _blocks(spec: DeepViTSpec) -> tuple[str, ...]:
    return (*(("stem",) if spec.stem_channels else ()), *plain_blocks(spec))


DEEPVIT = Family(
    name="deepvit",
    spec=DeepViTSpec,
    network=_network,
    sources=(RELEASED, WITHOUT_REATTENTION),
    presets=PRESETS,
    mask_kinds=("plain",),
    blocks=_blocks,
    last_block=last_of_blocks,
)
