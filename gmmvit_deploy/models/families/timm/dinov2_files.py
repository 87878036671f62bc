"""Checkpoints of DINOv2's backbones: the names of the tensors that differ from timm's names.

register_tokens (1, R, D)            reg_token
cls_token, pos_embed (1, n+1, D)     in a model with registers, because timm adds no positions to class token and
                                     registers: cls_token + pos_embed[0] → cls_token,  pos_embed[1:] → pos_embed
blocks.{i}.mlp.w12, w3               mlp.fc1, mlp.fc2 of the SwiGLU mlp (ViT-g)
mask_token                           stored, but read only in training

The backbone has no classifier: the user gives a linear head (`families.timm.linear_head`). The files do not hold timm's
name of the architecture, so the user types this name, such as ``vit_small_patch14_dinov2`` or
``vit_small_patch14_reg4_dinov2``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from gmmvit_deploy.models.families.timm import checkpoint
from gmmvit_deploy.models.families.timm.spec import TimmSpec
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.models.sources.shapes import Shapes
from gmmvit_deploy.models.sources.source import CheckpointSource, Conversion, TensorOrigins
from gmmvit_deploy.models.specs import Interpolation

if TYPE_CHECKING:
    from torch import Tensor


def tensor_origins(spec: TimmSpec) -> TensorOrigins:
    """Return a dict from name in the model to name in the file, or to the conversion that computes the tensor."""
    plain = checkpoint.tensor_origins(spec)
    origins: dict[str, str | Conversion] = dict(plain)
    packed = _has_packed_mlp(spec)
    if packed:
        for name, key in plain.items():
            origins[name] = str(key).replace(".mlp.fc1.", ".mlp.w12.").replace(".mlp.fc2.", ".mlp.w3.")
    if "network.reg_token" in plain:
        origins["network.reg_token"] = "register_tokens"  # noqa: S105 - a key of a state dict
        origins["network.cls_token"] = Conversion(keys=("cls_token", "pos_embed"), convert=_class_token)
        origins["network.pos_embed"] = Conversion(keys=("pos_embed",), convert=lambda positions: positions[:, 1:])
    return origins


def _class_token(token: Tensor, positions: Tensor) -> Tensor:
    return token + positions[:, :1]


def _has_packed_mlp(spec: TimmSpec) -> bool:
    """Return whether the mlp computes gate and values with a single linear layer."""
    import torch

    from gmmvit_deploy.models.families.timm.network import network_from_spec

    with torch.device("meta"):
        network = network_from_spec(spec)
    sizes = [module for path, module in network.named_modules() if path.endswith("blocks.0.mlp")]
    return bool(sizes) and type(sizes[0]).__name__ == "GluMlp"


def known_unused(spec: TimmSpec) -> Mapping[str, str]:
    unused = dict(checkpoint.known_unused(spec))
    unused["mask_token"] = "DINOv2 reads the mask token only in training"  # noqa: S105 - a key of a state dict
    return unused


def _interpolation(shapes: Shapes, hints: LoadHints) -> Interpolation:
    """Return the algorithm that resamples position embeddings: timm's for a model with registers, else DINO's."""
    return "timm" if "register_tokens" in shapes else "dino"


DINOV2_FILES = CheckpointSource(
    name="DINOv2",
    signature=(r"mask_token$", r"cls_token$", r"blocks\.0\.ls1\.gamma$"),
    spec=checkpoint.infer_spec,
    tensors=tensor_origins,
    known_unused=known_unused,
    images=checkpoint.known_images,
    taken_from=checkpoint.taken_from,
    interpolation=_interpolation,
    own_hints=("model_args",),
)
