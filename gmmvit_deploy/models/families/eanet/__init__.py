"""EANet: T2T-ViT whose attentions are external attentions, which read a trained memory.

The released code calls these architectures T2T-ViT. The two forms of the token transformer that the code calls
``performer`` and ``transformer`` compute the same function, so ``T2t_vit_14`` and ``T2t_vit_t_14`` have equal specs.

The paper is "Beyond Self-attention: External Attention using Two Linear Layers for Visual Tasks". Its code writes

tokens_to_token.attention{1,2}       norm1, attn.{q_linear,linear_0,linear_1,proj}, norm2, mlp.{fc1,fc2}
                                     tokens_type ``transformer``: attn.{q_linear,linear_1,linear_2,proj}
tokens_to_token.project              linear layer after the last unfold
cls_token                            the class token
pos_embed                            (1, N, D), positions that training does not change
blocks.{i}                           norm1, attn.{trans_dims,linear_0,linear_1,proj}, norm2, mlp.{fc1,fc2}
norm, head

The tensors determine every field of the spec. The second memory of a token transformer starts as a transposed view of
the first: the file stores the second memory with the strides of a transposed tensor, and, after training on a CPU, in
the same storage as the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from gmmvit_deploy.errors import CheckpointError
from gmmvit_deploy.models.families.family import Family, Network, last_of_blocks
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.models.sources.shapes import Shapes, infer_heads
from gmmvit_deploy.models.sources.source import CheckpointSource, TensorOrigins, renamed, within
from gmmvit_deploy.models.specs import MaskKind, MaskSpec, ModelSpec, require, require_counts

_PATCH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class EANetSpec(ModelSpec):
    """EANet: token transformers on overlapping patches, then blocks, all with external attention.

    heads: as the released code is given it; the attention has ``heads · expansion`` heads of ``dim / heads`` features.
    expansion: the width of the attention divided by ``dim``.
    slots, token_slots: the number of slots of the memories in the blocks, and in the token transformers.
    token_dim: the width of the token transformers.
    """

    family: ClassVar[str] = "eanet"
    mask_kinds: ClassVar[tuple[MaskKind, ...]] = ("plain",)
    dim: int
    depth: int
    heads: int
    mlp_dim: int
    token_dim: int
    expansion: int = 4
    slots: int = 64
    token_slots: int = 128

    def __post_init__(self) -> None:
        ModelSpec.__post_init__(self)
        require_counts(self, "dim", "depth", "heads", "mlp_dim", "token_dim", "expansion", "slots", "token_slots")
        require(
            self.image_size % _PATCH == 0,
            f"image side {self.image_size}: expected a multiple of {_PATCH}, because the network divides the side by "
            "4, 2 and 2",
        )
        require(self.dim % self.heads == 0, f"the width {self.dim} is not a multiple of {self.heads} heads")

    @property
    def grids(self) -> tuple[int, int, int]:
        """The number of tokens along a side of the grid: for both token transformers, then for the blocks."""
        return self.image_size // 4, self.image_size // 8, self.image_size // _PATCH

    @property
    def tokens(self) -> int:
        """N: the number of tokens of the blocks, with the class token."""
        return self.grids[-1] ** 2 + 1

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


def _spec(dim: int, depth: int, heads: int, mlp_ratio: int, classes: int, image_size: int, mask: MaskSpec) -> EANetSpec:
    return EANetSpec(
        image_size=image_size,
        classes=classes,
        dim=dim,
        depth=depth,
        heads=heads,
        mlp_dim=mlp_ratio * dim,
        token_dim=64,
        mask=mask,
    )


PRESETS: Mapping[str, Callable[[int, int, MaskSpec], EANetSpec]] = {
    "T2t_vit_7": partial(_spec, 256, 7, 4, 2),
    "T2t_vit_10": partial(_spec, 256, 10, 4, 2),
    "T2t_vit_12": partial(_spec, 256, 12, 4, 2),
    "T2t_vit_14": partial(_spec, 384, 14, 6, 3),
    "T2t_vit_t_14": partial(_spec, 384, 14, 6, 3),
    "T2t_vit_19": partial(_spec, 448, 19, 7, 3),
    "T2t_vit_t_19": partial(_spec, 448, 19, 7, 3),
    "T2t_vit_24": partial(_spec, 512, 24, 8, 3),
    "T2t_vit_t_24": partial(_spec, 512, 24, 8, 3),
    "T2t_vit_14_resnext": partial(_spec, 384, 14, 32, 3),
    "T2t_vit_14_wide": partial(_spec, 768, 4, 12, 3),
}


_TOKENS = "tokens_to_token"
_FIRST_PATCH = 49
# The first memory of the form `performer` is the first pattern's linear_0; only `transformer` has a linear_2.
_EXTERNAL = rf"({_TOKENS}\.attention1\.attn\.q_linear|blocks\.0\.attn\.trans_dims)\."


def released_names(spec: EANetSpec, names: Iterable[str], *, memories: tuple[str, str]) -> TensorOrigins:
    """Return name in the model → name in the file.  memories: the names of both memories of a token transformer."""
    norms_and_mlp = {"attention_norm": "norm1", "mlp_norm": "norm2", "mlp.0": "mlp.fc1", "mlp.2": "mlp.fc2"}
    transformer = {"project": "q_linear", "to_slots": memories[0], "from_slots": memories[1], "out": "proj"}
    attention = {"project": "trans_dims", "to_slots": "linear_0", "from_slots": "linear_1", "out": "proj"}
    table = {
        "project": f"{_TOKENS}.project",
        "positions.class_token": "cls_token",
        "positions.position_embedding": "pos_embed",
        **within("blocks.{}", "blocks.{}", norms_and_mlp),
        **within("blocks.{}.attention", "blocks.{}.attn", attention),
        "norm": "norm",
        "head": "head",
    }
    for i in range(2):
        ours, theirs = f"token_transformers.{i}", f"{_TOKENS}.attention{i + 1}"
        table |= within(ours, theirs, norms_and_mlp) | within(ours, f"{theirs}.attn", transformer)
    return renamed(names, table)


def infer_spec(shapes: Shapes, hints: LoadHints, *, memories: tuple[str, str]) -> EANetSpec:
    first = f"{_TOKENS}.attention1.attn"
    grid = shapes.grid(shapes.of("pos_embed", rank=3)[1] - 1, where="pos_embed, without the class token,")
    image_size, classes = _PATCH * grid, shapes.of("head.weight", rank=2)[0]
    inner_dim, dim = shapes.of("blocks.0.attn.trans_dims.weight", rank=2)
    slots, head_dim = shapes.of("blocks.0.attn.linear_0.weight", rank=2)
    if inner_dim % dim or dim % head_dim:
        raise CheckpointError(
            f"{shapes.source}: blocks.0.attn.trans_dims.weight has shape {(inner_dim, dim)} and "
            f"blocks.0.attn.linear_0.weight has shape {(slots, head_dim)}; expected (a multiple of D, D) and (slots, a "
            "divisor of D), for a width D"
        )
    evidence = "the number of heads that follows from the memories of the file is"
    heads = infer_heads(shapes, hints, width=dim, shown=(dim // head_dim, evidence), presets=PRESETS)
    return EANetSpec(
        image_size=image_size,
        channels=shapes.of(f"{_TOKENS}.attention1.norm1.weight", rank=1)[0] // _FIRST_PATCH,
        classes=classes,
        dim=dim,
        depth=shapes.count(r"blocks\.(\d+)\."),
        heads=heads,
        mlp_dim=shapes.of("blocks.0.mlp.fc1.weight", rank=2)[0],
        token_dim=shapes.of(f"{first}.q_linear.weight", rank=2)[0],
        expansion=inner_dim // dim,
        slots=slots,
        token_slots=shapes.of(f"{first}.{memories[0]}.weight", rank=2)[0],
        mask=MaskSpec(),
    )


def _source(name: str, memories: tuple[str, str]) -> CheckpointSource:
    return CheckpointSource(
        name=f"the released code of EANet (tokens_type {name})",
        signature=(
            rf"{_TOKENS}\.attention1\.",
            _EXTERNAL,
            rf"{_TOKENS}\.attention[12]\.attn\.{memories[0 if name == 'performer' else 1]}\.weight$",
        ),
        spec=partial(infer_spec, memories=memories),
        tensors=partial(released_names, memories=memories),
    )


PERFORMER = _source("performer", ("linear_0", "linear_1"))
TRANSFORMER = _source("transformer", ("linear_1", "linear_2"))


def _network() -> Network:
    from gmmvit_deploy.models.families.eanet import folding
    from gmmvit_deploy.models.families.eanet.model import MISTAKES, EANet
    from gmmvit_deploy.models.layers.patches import unfold_as_convolution

    return Network(
        build=EANet,
        folding_passes=(
            unfold_as_convolution,
            folding.merge_token_memories,
            folding.class_token_as_row,
            folding.merge_memories,
        ),
        mistakes=MISTAKES,
    )


def _blocks(spec: EANetSpec) -> tuple[str, ...]:
    return (*(f"token_transformers.{step}" for step in range(2)), *(f"blocks.{block}" for block in range(spec.depth)))


EANET = Family(
    name="eanet",
    spec=EANetSpec,
    network=_network,
    sources=(PERFORMER, TRANSFORMER),
    presets=PRESETS,
    mask_kinds=("plain",),
    blocks=_blocks,
    last_block=last_of_blocks,
)
