"""Checkpoints of ``MyViT``, the model of a widely copied tutorial: the tensor names, and how to infer the spec.

linear_mapper                             linear layer on patches flattened in the order (channel, row, column)
class_token                               (1, D), where D is the width
blocks.{i}                                norm1, norm2, mlp.0, mlp.2
blocks.{i}.mhsa.{q,k,v}_mappings.{h}      (D/H, D/H), separate for each of the H heads
mlp.0                                     the linear layer that computes the logits

The file determines the width, the depth, the number of heads, the mlp width and the number of classes. The file does
not determine the side and the channels of the images, so the user gives the options --image-size and --channels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gmmvit_deploy.errors import CheckpointError
from gmmvit_deploy.families.naive_vit.spec import NaiveViTSpec
from gmmvit_deploy.sources.hints import LoadHints
from gmmvit_deploy.sources.shapes import Shapes, asked_image, exact_root, infer_heads
from gmmvit_deploy.sources.source import CheckpointSource, Conversion, TensorOrigins
from gmmvit_deploy.specs import MaskSpec

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["TUTORIAL"]

_MAPPER = "linear_mapper.weight"
_FIRST = "blocks.0.mhsa.q_mappings"
_PARTS = ("weight", "bias")


def infer_spec(shapes: Shapes, hints: LoadHints) -> NaiveViTSpec:
    """Infer the spec from names and shapes.  ``hints`` give the side and the channels of the images.

    Errors: CheckpointError when the side or the channels are not given, or do not fit the size of the file's patches,
    or when a required tensor is missing.
    """
    source = shapes.source
    image_size, channels = asked_image(source, hints)
    dim, values = shapes.of(_MAPPER, rank=2)
    patch_size = exact_root(values / channels)
    if patch_size is None or image_size % patch_size:
        raise CheckpointError(
            f"{source}: {_MAPPER} takes {values} values per patch; expected {channels}·p·p, where patches of "
            f"p × p pixels tile an image of {image_size} × {image_size} pixels",
            hint="type the --image-size and the --channels that the model was trained with",
        )
    heads = infer_heads(
        source,
        width=dim,
        known=shapes.count(rf"{_FIRST}\.(\d+)\."),
        evidence="the number of heads in the first block of the file is",
        hints=hints,
        preset_heads=None,
    )
    return NaiveViTSpec(
        image_size=image_size,
        channels=channels,
        patch_size=patch_size,
        classes=shapes.of("mlp.0.weight", rank=2)[0],
        dim=dim,
        depth=shapes.count(r"blocks\.(\d+)\."),
        heads=heads,
        mlp_dim=shapes.of("blocks.0.mlp.0.weight", rank=2)[0],
        mask=MaskSpec(),
    )


def tensor_origins(spec: NaiveViTSpec) -> TensorOrigins:
    """Return name in the model → the key of the file, or the conversion that computes the tensor."""

    def channel_fastest(weight: Tensor) -> Tensor:
        """Reorder the input features of a weight: (D, channel · row · column)  →  (D, row · column · channel)."""
        patches: Tensor = weight.unflatten(1, (spec.channels, spec.patch_size, spec.patch_size))
        return patches.permute(0, 2, 3, 1).flatten(1).contiguous()

    origins: dict[str, str | Conversion] = {
        "patch_embedding.project.weight": Conversion(keys=(_MAPPER,), convert=channel_fastest),
        "patch_embedding.project.bias": "linear_mapper.bias",
        "class_token": Conversion(keys=("class_token",), convert=lambda token: token[None]),
        "head.weight": "mlp.0.weight",
        "head.bias": "mlp.0.bias",
    }
    pairs = {"attention_norm": "norm1", "mlp_norm": "norm2", "mlp.0": "mlp.0", "mlp.2": "mlp.2"}
    for block in range(spec.depth):
        origins |= {
            f"blocks.{block}.{ours}.{part}": f"blocks.{block}.{theirs}.{part}"
            for ours, theirs in pairs.items()
            for part in _PARTS
        }
        keys = [f"blocks.{block}.mhsa.{part}_mappings.{head}" for part in "qkv" for head in range(spec.heads)]
        qkv = f"blocks.{block}.attention.qkv"
        origins[f"{qkv}.weight"] = Conversion(keys=tuple(f"{key}.weight" for key in keys), convert=_stacked_weights)
        origins[f"{qkv}.bias"] = Conversion(keys=tuple(f"{key}.bias" for key in keys), convert=_stacked)
    return origins


def _stacked(*tensors: Tensor) -> Tensor:
    """Stack the tensors of the H heads to (3, H, …): first the heads of Q, then of K, then of V."""
    import torch

    stacked: Tensor = torch.stack(tensors).unflatten(0, (3, -1))
    return stacked


def _stacked_weights(*weights: Tensor) -> Tensor:
    """Stack the weights with `_stacked` and transpose each weight to (input feature, output feature).

    The linear layers in the file store (output feature, input feature).
    """
    return _stacked(*weights).transpose(-2, -1).contiguous()


TUTORIAL = CheckpointSource(
    name="the tutorial's MyViT",
    signature=(r"linear_mapper\.weight$", r"blocks\.0\.mhsa\.q_mappings\.0\.weight$"),
    spec=infer_spec,
    tensors=tensor_origins,
)
