"""Naive ViT: the vision transformer of a widely copied tutorial, trained on MNIST.

linear_mapper                             linear layer on patches flattened in the order (channel, row, column)
class_token                               (1, D), where D is the width
blocks.{i}                                norm1, norm2, mlp.0, mlp.2
blocks.{i}.mhsa.{q,k,v}_mappings.{h}      (D/H, D/H), separate for each of the H heads
mlp.0                                     the linear layer that computes the logits
positional_embeddings, or pos_embed       (N, D) or (1, N, D), the positions; in some copies of the tutorial's code only

The file determines the width, the depth, the number of heads, the mlp width and the number of classes. If several
numbers of channels fit the size of the patches, the user types --set channels. The side of the images follows from the
channels and the number of stored positions; without stored positions, the user gives the option --image-size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from gmmvit_deploy.errors import CheckpointError
from gmmvit_deploy.models.families.family import Family, Network, last_of_blocks, plain_blocks
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.models.sources.shapes import Shapes, image_of_patches, infer_heads
from gmmvit_deploy.models.sources.source import CheckpointSource, Conversion, TensorOrigins, batched, renamed
from gmmvit_deploy.models.specs import MaskSpec, PatchSpec, require

if TYPE_CHECKING:
    from torch import Tensor

    from gmmvit_deploy.models.layers.model import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class NaiveViTSpec(PatchSpec):
    """The tutorial's ViT: class token, fixed positions, and separate maps of Q, K and V for each head.

    stored_positions: True if the checkpoint holds the positions, False if the positions are the sinusoids that follow
    from the number of tokens and the width.
    """

    family: ClassVar[str] = "naive_vit"
    stored_positions: bool = False

    def __post_init__(self) -> None:
        PatchSpec.__post_init__(self)
        require(self.dim % self.heads == 0, f"the width {self.dim} is not a multiple of {self.heads} heads")
        require(self.mask.kind == "plain", "a naive ViT has no mask on its attention scores")

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


_MAPPER = "linear_mapper"
_FIRST = "blocks.0.mhsa.q_mappings"
_BUFFER, _PARAMETER = "positional_embeddings", "pos_embed"
_NAME = "the tutorial's MyViT"
# The second name is of a norm in the first version of MyViT, which `_refuse_first_version` refuses by name.
_SIGNATURE = (r"linear_mapper\.weight$", r"(blocks\.0\.mhsa\.q_mappings\.0|ln1)\.weight$")


def infer_spec(shapes: Shapes, hints: LoadHints, *, positions: str) -> NaiveViTSpec:
    """Infer the spec.  positions: the name of the tensor with the stored positions, if the file holds positions."""
    source = shapes.source
    _refuse_first_version(shapes)
    dim, values = shapes.of(f"{_MAPPER}.weight", rank=2)
    stored = positions in shapes
    grid = _stored_grid(shapes, positions) if stored else None
    image_size, channels, patch_size = image_of_patches(source, hints, name=_MAPPER, values=values, grid=grid)
    evidence = "the number of heads in the first block of the file is"
    heads = infer_heads(shapes, hints, width=dim, shown=(shapes.count(rf"{_FIRST}\.(\d+)\."), evidence))
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
        stored_positions=stored,
    )


def _refuse_first_version(shapes: Shapes) -> None:
    if "ln1.weight" in shapes and f"{_FIRST}.0.weight" not in shapes:
        raise CheckpointError(
            f"{shapes.source}: the file holds the first version of MyViT, with a single block at the root of the file "
            "(ln1, msa, ln2, enc_mlp), whose norms average over all tokens together and whose mlp has a ReLU; expected "
            "the later version, with blocks.0 in the names of the tensors",
            hint="train the model again with the version of MyViT that has n_blocks",
        )


def _stored_grid(shapes: Shapes, name: str) -> int:
    tokens = shapes.of(name, rank=3 if shapes.tensors[name].dim() == 3 else 2)[-2]
    return shapes.grid(tokens - 1, where=f"{name}, without the class token,")


def tensor_origins(spec: NaiveViTSpec, names: Iterable[str], *, positions: str) -> TensorOrigins:
    def channel_fastest(weight: Tensor) -> Tensor:
        """Reorder the input features of a weight: (D, channel · row · column)  →  (D, row · column · channel)."""
        patches: Tensor = weight.unflatten(1, (spec.channels, spec.patch_size, spec.patch_size))
        return patches.permute(0, 2, 3, 1).flatten(1).contiguous()

    heads = [f"blocks.{{}}.mhsa.{part}_mappings.{head}" for part in "qkv" for head in range(spec.heads)]
    table: dict[str, str | Conversion] = {
        "patch_embedding.project.weight": Conversion(keys=(f"{_MAPPER}.weight",), convert=channel_fastest),
        "patch_embedding.project.bias": f"{_MAPPER}.bias",
        "class_token": Conversion(keys=("class_token",), convert=lambda token: token[None]),
        "positions": Conversion(keys=(positions,), convert=batched),
        "blocks.{}.attention_norm": "blocks.{}.norm1",
        "blocks.{}.attention.qkv.weight": Conversion(
            keys=tuple(f"{h}.weight" for h in heads), convert=_stacked_weights
        ),
        "blocks.{}.attention.qkv.bias": Conversion(keys=tuple(f"{h}.bias" for h in heads), convert=_stacked),
        "blocks.{}.mlp_norm": "blocks.{}.norm2",
        "blocks.{}.mlp": "blocks.{}.mlp",
        "head": "mlp.0",
    }
    return renamed(names, table)


def _stacked(*tensors: Tensor) -> Tensor:
    """Stack the tensors of the H heads to (3, H, …): first the heads of Q, then of K, then of V."""
    import torch

    stacked: Tensor = torch.stack(tensors).unflatten(0, (3, -1))
    return stacked


def _stacked_weights(*weights: Tensor) -> Tensor:
    """Stack the weights (output feature, input feature) of the file, each transposed."""
    return _stacked(*weights).transpose(-2, -1).contiguous()


def _source(name: str, signature: tuple[str, ...], *, positions: str) -> CheckpointSource:
    return CheckpointSource(
        name=name,
        signature=signature,
        spec=partial(infer_spec, positions=positions),
        tensors=partial(tensor_origins, positions=positions),
    )


TUTORIAL = _source(_NAME, _SIGNATURE, positions=_BUFFER)
PARAMETER_POSITIONS = _source(
    f"copies of {_NAME} with {_PARAMETER}", (*_SIGNATURE, rf"{_PARAMETER}$"), positions=_PARAMETER
)


def _softmax_at_the_end(model: Model) -> bool:
    from torch import nn

    model.head = nn.Sequential(model.get_submodule("head"), nn.Softmax(dim=-1))
    return True


def _positions_without_class_token(model: Model) -> bool:
    positions = model.get_buffer("positions")
    positions.copy_(positions.roll(1, dims=1))
    return True


def _network() -> Network:
    from gmmvit_deploy.models.families.naive_vit.model import NaiveViT, stack_heads

    return Network(
        build=NaiveViT,
        folding_passes=(stack_heads,),
        mistakes=(
            ("the softmax of training in place of the logits", _softmax_at_the_end),
            ("positions counted from the first patch", _positions_without_class_token),
        ),
    )


NAIVE_VIT = Family(
    name="naive_vit",
    spec=NaiveViTSpec,
    network=_network,
    sources=(TUTORIAL, PARAMETER_POSITIONS),
    mask_kinds=("plain",),
    blocks=plain_blocks,
    last_block=last_of_blocks,
    default_resize="stretch-bilinear",
)
