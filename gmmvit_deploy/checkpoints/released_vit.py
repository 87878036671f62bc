"""ViT checkpoints of the paper's released training code: names, shapes, what they tell.

to_patch_embedding.1          linear over (row, column, channel) patches
pos_embedding, cls_token      (1, N, D); the class token in plain models only
transformer.layers.{i}.0      norm, fn.to_qkv, fn.to_out.0, fn.mask.{alpha,sigma,mask}
transformer.layers.{i}.1      norm, fn.net.0, fn.net.3
mlp_head.0, mlp_head.1        LayerNorm, linear
mask                          the base mask once more, unused
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from gmmvit_deploy.checkpoints.hints import LoadHints
from gmmvit_deploy.errors import CheckpointError
from gmmvit_deploy.presets import preset_spec
from gmmvit_deploy.specs import MaskSpec, ViTSpec

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["infer_spec", "is_vit", "known_unused", "released_names"]

_BLOCK = re.compile(r"transformer\.layers\.(\d+)\.[01]\.")
_MASK = "transformer.layers.0.0.fn.mask"


def is_vit(names: Mapping[str, object]) -> bool:
    """True when the names are those of a released ViT."""
    return "to_patch_embedding.1.weight" in names and any(_BLOCK.match(name) for name in names)


def released_names(spec: ViTSpec) -> dict[str, str]:
    """Name in our `ViT` → name in the released file, for every tensor of the trained model."""
    names = {
        "patch_embedding.project.weight": "to_patch_embedding.1.weight",
        "patch_embedding.project.bias": "to_patch_embedding.1.bias",
        "position_embedding": "pos_embedding",
        "head_norm.weight": "mlp_head.0.weight",
        "head_norm.bias": "mlp_head.0.bias",
        "head.weight": "mlp_head.1.weight",
        "head.bias": "mlp_head.1.bias",
    }
    if spec.class_token:
        names |= {"class_token": "cls_token"}
    block = {
        "attention_norm.weight": "0.norm.weight",
        "attention_norm.bias": "0.norm.bias",
        "attention.qkv.weight": "0.fn.to_qkv.weight",
        "mlp_norm.weight": "1.norm.weight",
        "mlp_norm.bias": "1.norm.bias",
        "mlp.0.weight": "1.fn.net.0.weight",
        "mlp.0.bias": "1.fn.net.0.bias",
        "mlp.2.weight": "1.fn.net.3.weight",
        "mlp.2.bias": "1.fn.net.3.bias",
    }
    if spec.projects_output:
        block |= {f"attention.out.{part}": f"0.fn.to_out.0.{part}" for part in ("weight", "bias")}
    if spec.mask.kind == "elm":
        block["attention.mask.weight"] = "0.fn.mask.mask"
    if spec.mask.kind == "gmm":
        block |= {f"attention.mask.{part}": f"0.fn.mask.{part}" for part in ("alpha", "sigma")}
        if not spec.mask.closed_form:
            block["attention.mask.base"] = "0.fn.mask.mask"
    for i in range(spec.depth):
        names |= {f"blocks.{i}.{ours}": f"transformer.layers.{i}.{theirs}" for ours, theirs in block.items()}
    return names


def known_unused(spec: ViTSpec) -> dict[str, str]:
    """Names a released file may hold that the network never reads → why not."""
    unused = {"mask": "the base mask, stored once more at the root"}
    if spec.mask.closed_form:
        reason = "a stored base; this model was trained with the closed form"
        unused |= {f"transformer.layers.{i}.0.fn.mask.mask": reason for i in range(spec.depth)}
    return unused


def infer_spec(tensors: Mapping[str, Tensor], hints: LoadHints, *, source: str) -> ViTSpec:
    """Read the whole spec off names and shapes, asking ``hints`` only where they are silent.

    source: the file's name, for messages.
    Errors: CheckpointError when a tensor that tells the spec is missing or has an impossible
    shape, when heads are needed and not given, or when hints contradict the file.
    """
    shapes = _Shapes(tensors, source)
    dim, patch_values = shapes.of("to_patch_embedding.1.weight", rank=2)
    patch_size = _exact_root(patch_values / 3)
    if patch_size is None:
        raise CheckpointError(
            f"{source}: to_patch_embedding.1.weight takes patches of {patch_values} values; "
            "3·p·p for a square RGB patch was wanted"
        )
    class_token = "cls_token" in tensors
    positions = shapes.of("pos_embedding", rank=3)[1]
    grid = _exact_root(positions - int(class_token))
    if grid is None:
        raise CheckpointError(
            f"{source}: pos_embedding has {positions} positions"
            f"{' with a class token' if class_token else ''}; a square grid of patches was wanted"
        )
    mask, mask_heads = _infer_mask(shapes, hints, source)
    if class_token and mask.kind != "plain":
        raise CheckpointError(
            f"{source}: it has a class token and a {mask.kind} mask; the released masked ViTs have none, "
            "so how the two would meet is not known"
        )
    depth = 1 + max(int(found.group(1)) for found in map(_BLOCK.match, tensors) if found)
    inner_dim = shapes.of("transformer.layers.0.0.fn.to_qkv.weight", rank=2)[0] // 3
    has_output_projection = "transformer.layers.0.0.fn.to_out.0.weight" in tensors
    classes = shapes.of("mlp_head.1.weight", rank=2)[0]
    preset = None
    if hints.preset is not None:
        preset = preset_spec(hints.preset, classes=classes, image_size=grid * patch_size, mask=mask)
    heads = _infer_heads(
        source,
        inner_dim=inner_dim,
        mask_heads=mask_heads,
        single=not has_output_projection and inner_dim == dim,
        told=hints.heads,
        preset=preset,
    )
    if heads == 1 and mask.shared:
        mask = replace(mask, shared=False)  # one head shares its mask with nobody
    spec = ViTSpec(
        image_size=grid * patch_size,
        patch_size=patch_size,
        classes=classes,
        dim=dim,
        depth=depth,
        heads=heads,
        head_dim=inner_dim // heads,
        mlp_dim=shapes.of("transformer.layers.0.1.fn.net.0.weight", rank=2)[0],
        class_token=class_token,
        mask=mask,
    )
    if preset is not None:
        _check_preset(spec, preset, name=str(hints.preset), source=source)
    return spec


class _Shapes:
    """Shapes by name, with an error that says what was wanted."""

    def __init__(self, tensors: Mapping[str, Tensor], source: str) -> None:
        self.tensors = tensors
        self.source = source

    def of(self, name: str, *, rank: int) -> tuple[int, ...]:
        if name not in self.tensors:
            raise CheckpointError(f"{self.source}: {name} is missing; the model's size is read off it")
        shape = tuple(self.tensors[name].shape)
        if len(shape) != rank or 0 in shape:
            raise CheckpointError(
                f"{self.source}: {name} has shape {shape}; {rank} dimensions, none empty, were wanted"
            )
        return shape


def _exact_root(value: float) -> int | None:
    if value < 1 or value != int(value):
        return None
    root = math.isqrt(int(value))
    return root if root * root == value else None


def _infer_mask(shapes: _Shapes, hints: LoadHints, source: str) -> tuple[MaskSpec, int | None]:
    """The mask, and how many heads it speaks of: None when it does not tell."""
    parts = {part for part in ("alpha", "sigma", "mask") if f"{_MASK}.{part}" in shapes.tensors}
    if not parts:
        return MaskSpec(), None
    if parts == {"mask"}:
        if hints.closed_form:
            raise CheckpointError(f"{source}: closed form was asked for, but the file holds no alpha and sigma")
        return MaskSpec(kind="elm"), None
    missing = {"alpha", "sigma"} - parts
    if missing:
        raise CheckpointError(f"{source}: {_MASK}.{missing.pop()} is missing")
    if "mask" not in parts and not hints.closed_form:
        raise CheckpointError(
            f"{source}: {_MASK}.mask, the stored base mask, is missing",
            hint="if the model was trained with the paper's closed formula, say --mask-form closed",
        )
    kernels, heads, *_ = shapes.of(f"{_MASK}.alpha", rank=4)
    mask = MaskSpec(kind="gmm", kernels=kernels, shared=heads == 1, closed_form=bool(hints.closed_form))
    return mask, heads if heads > 1 else None


def _infer_heads(
    source: str, *, inner_dim: int, mask_heads: int | None, single: bool, told: int | None, preset: ViTSpec | None
) -> int:
    if told is not None and preset is not None and told != preset.heads:
        raise CheckpointError(f"{source}: {told} heads were named, but the preset has {preset.heads}")
    known = mask_heads if mask_heads is not None else (1 if single else None)
    if known is not None and told is not None and told != known:
        evidence = "its masks have" if mask_heads is not None else "without an output projection it has"
        raise CheckpointError(f"{source}: {told} heads were named, but {evidence} {known}")
    heads = known or told or (preset.heads if preset is not None else None)
    if heads is None:
        raise CheckpointError(
            f"{source}: the number of attention heads cannot be read off this file",
            hint="say --heads N with the number it was trained with (wrong heads raise no error, they only "
            f"give wrong answers); q, k and v are {inner_dim} wide, so one of {_divisors(inner_dim)}; or --preset NAME",
        )
    if inner_dim % heads:
        raise CheckpointError(
            f"{source}: {heads} heads do not divide q, k and v, which are {inner_dim} wide",
            hint=f"one of {_divisors(inner_dim)}: the number it was trained with",
        )
    return heads


def _divisors(width: int) -> list[int]:
    """Head counts that are possible, up to the largest anybody trains with."""
    return [n for n in range(1, 65) if width % n == 0]


def _check_preset(spec: ViTSpec, preset: ViTSpec, *, name: str, source: str) -> None:
    fields = ["dim", "depth", "heads", "head_dim", "mlp_dim"]
    if spec.image_size in (32, 64):  # the sizes that the released code has a patch size for
        fields.insert(0, "patch_size")
    differing = [
        f"{field} {getattr(spec, field)} (the preset has {getattr(preset, field)})"
        for field in fields
        if getattr(spec, field) != getattr(preset, field)
    ]
    if differing:
        raise CheckpointError(f"{source}: not a {name}: {', '.join(differing)}")
