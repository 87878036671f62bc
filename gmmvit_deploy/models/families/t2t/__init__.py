"""T2T-ViT: single-head token transformers on overlapping patches, followed by a ViT.

The released codes (`sources.released`) write these tensors:

tokens_to_token.attention{1,2}       norm1, attn.{qkv,proj,mask}, norm2, mlp.{fc1,fc2}
tokens_to_token.attention{1,2}.mask  a second copy of the base mask, which the network never reads
tokens_to_token.project              linear layer after the last unfold
tokens_to_token.norm                 a norm that the network never applies
pos_embed                            position embedding, which was not trained
cls_token                            a class token that the network never reads
blocks.{i}                           norm1, attn.{qkv,proj,mask}, norm2, mlp.{fc1,fc2}
norm, head
mask                                 a second copy of the base mask, which the network never reads

The code of SPT and LSA writes the same names, and

pos_embed, cls_token                 the network reads the class token, which also has a position
tokens_to_token.attention1           with SPT: five times as many inputs, for the image and four shifted copies
{attention1,2 and blocks.{i}}.attn.scale    with LSA: the temperature of each head
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from gmmvit_deploy.models.families.family import Family, LastBlock, Network, last_of_blocks
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.models.sources.released import VIEWS, released_source, score_names, temperature_heads
from gmmvit_deploy.models.sources.shapes import Shapes, exact_root, infer_heads, infer_mask, mask_heads
from gmmvit_deploy.models.sources.source import BLOCK_OF_TIMM, TensorOrigins, renamed, within
from gmmvit_deploy.models.specs import CHANNELS, MaskSpec, ModelSpec, require, require_counts, require_no_mask_with


@dataclass(frozen=True, slots=True, kw_only=True)
class T2TSpec(ModelSpec):
    """T2T-ViT: single-head token transformers on overlapping patches, followed by a ViT.

    token_layers: the number of token transformers.
    token_dim, token_mlp_dim: the output width and the mlp width of the token transformers.
    class_token: True if the head reads a class token, False if the head reads the mean of all tokens.
    spt, lsa: True for shifted patch tokenisation, and for locality self-attention, as in the formulas of the model.
    """

    family: ClassVar[str] = "t2t"
    flags: ClassVar[tuple[str, ...]] = ("class_token", "spt", "lsa")
    dim: int
    depth: int
    heads: int
    head_dim: int
    mlp_dim: int
    token_layers: int
    token_dim: int
    token_mlp_dim: int
    class_token: bool = False
    spt: bool = False
    lsa: bool = False

    def __post_init__(self) -> None:
        ModelSpec.__post_init__(self)
        require_counts(
            self, "dim", "depth", "heads", "head_dim", "mlp_dim", "token_layers", "token_dim", "token_mlp_dim"
        )
        require(
            self.image_size % 2 ** (self.token_layers + 1) == 0,
            f"image side {self.image_size}: expected a multiple of {2 ** (self.token_layers + 1)}, "
            f"because the network halves the grid {self.token_layers + 1} times",
        )
        require_no_mask_with(self, "spt", "lsa")
        require(
            self.class_token or not (self.spt or self.lsa),
            "a T2T with SPT or LSA has a class token, which the head reads",
        )
        require(
            not (self.class_token and self.mask.kind != "plain"),
            "a masked T2T has no class token, because the mask covers only the grid of tokens",
        )
        require(
            not (self.class_token and self.heads == 1) or self.head_dim == self.dim,
            f"a T2T with a class token and one head adds V to its input, so head_dim must be dim: expected {self.dim}, "
            f"got {self.head_dim}",
        )

    @property
    def tokens(self) -> int:
        """N: the number of tokens of the ViT."""
        return self.grids[-1] ** 2 + int(self.class_token)

    @property
    def views(self) -> int:
        """The number of channels that the first unfold reads: 5c with the shifted copies of the image, else c."""
        return (5 if self.spt else 1) * self.channels

    @property
    def grids(self) -> tuple[int, ...]:
        """The number of tokens along a side of the grid: for each token transformer, then for the ViT."""
        return tuple(self.image_size >> step for step in range(1, self.token_layers + 2))


def _t2t(classes: int, image_size: int, mask: MaskSpec) -> T2TSpec:
    return T2TSpec(
        image_size=image_size,
        classes=classes,
        dim=256,
        depth=12,
        heads=4,
        head_dim=64,
        mlp_dim=512,
        token_layers=2 if image_size == 64 else 1,
        token_dim=64,
        token_mlp_dim=64,
        mask=mask,
    )


PRESETS: Mapping[str, Callable[[int, int, MaskSpec], T2TSpec]] = {"t2t": _t2t}


_TOKENS = "tokens_to_token"
_FIRST = r"tokens_to_token\.attention1\."
_TEMPERATURE = r"(tokens_to_token\.attention|blocks\.)\d+\.attn\.scale$"


def released_names(spec: T2TSpec, names: Iterable[str]) -> TensorOrigins:
    in_transformer = {ours.removeprefix("attention."): theirs for ours, theirs in BLOCK_OF_TIMM.items()}
    table = {
        "project": f"{_TOKENS}.project",
        "position_embedding": "pos_embed",
        "class_token": "cls_token",
        "unused.class_token": "cls_token",
        "unused.token_norm_weight": f"{_TOKENS}.norm.weight",
        "unused.token_norm_bias": f"{_TOKENS}.norm.bias",
        **within("blocks.{}", "blocks.{}", BLOCK_OF_TIMM),
        **score_names("blocks.{}.attention", "blocks.{}.attn"),
        "norm": "norm",
        "head": "head",
    }
    for i in range(spec.token_layers):
        ours, theirs = f"token_transformers.{i}", f"{_TOKENS}.attention{i + 1}"
        table |= within(ours, theirs, in_transformer) | score_names(ours, f"{theirs}.attn")
    return renamed(names, table)


def _channels(shapes: Shapes) -> tuple[int, bool]:
    """Return (c, SPT): the number c of image channels, and whether the network reads shifted copies of the image.

    The input width of the first token transformer is 9·c, or 45·c with shifted copies. No supported c fits both.
    """
    channels = shapes.of(f"{_TOKENS}.attention1.attn.qkv.weight", rank=2)[1] // 9
    return (channels, False) if channels in CHANNELS else (channels // VIEWS, True)


def _grid(shapes: Shapes) -> tuple[int, bool]:
    """Return (side of the grid of tokens, whether the network reads a class token, which then has a position)."""
    positions = shapes.of("pos_embed", rank=3)[1]
    if exact_root(positions) is None and exact_root(positions - 1) is not None:
        return shapes.grid(positions - 1, where="pos_embed without the class token"), True
    return shapes.grid(positions, where="pos_embed"), False


def infer_spec(shapes: Shapes, hints: LoadHints) -> T2TSpec:
    """Infer the spec.  The number of heads follows only from per-head masks and temperatures."""
    grid, class_token = _grid(shapes)
    token_layers = shapes.count(rf"{_TOKENS}\.attention(\d+)\.") - 1
    image_size = grid << (token_layers + 1)
    channels, spt = _channels(shapes)
    mask = infer_mask(shapes, hints, "blocks.0.attn.mask")
    inner_dim = shapes.of("blocks.0.attn.qkv.weight", rank=2)[0] // 3
    classes = shapes.of("head.weight", rank=2)[0]
    temperatures = temperature_heads(shapes, "blocks.0.attn.scale", pattern=_TEMPERATURE)
    shown = (temperatures, "the number of temperatures in the file is")
    if temperatures is None:
        (in_masks,) = mask_heads(shapes, ["blocks.0.attn.mask"])
        shown = (in_masks if in_masks > 1 else None, "the number of heads in the masks of the file is")
    heads = infer_heads(shapes, hints, width=inner_dim, shown=shown, presets=PRESETS)
    return T2TSpec(
        image_size=image_size,
        classes=classes,
        dim=shapes.of(f"{_TOKENS}.project.weight", rank=2)[0],
        depth=shapes.count(r"blocks\.(\d+)\."),
        heads=heads,
        head_dim=inner_dim // heads,
        mlp_dim=shapes.of("blocks.0.mlp.fc1.weight", rank=2)[0],
        token_layers=token_layers,
        token_dim=shapes.of(f"{_TOKENS}.attention1.attn.proj.weight", rank=2)[0],
        token_mlp_dim=shapes.of(f"{_TOKENS}.attention1.mlp.fc1.weight", rank=2)[0],
        mask=mask.for_heads(heads),
        channels=channels,
        class_token=class_token,
        spt=spt,
        lsa=temperatures is not None,
    )


RELEASED = released_source(
    signature=(_FIRST,),
    spec=infer_spec,
    names=released_names,
    known_unused={
        "mask": "a second copy of the base mask, at the root of the file",
        rf"{_TOKENS}\.attention\d+\.mask": "a second copy of the token transformer's base mask",
    },
)


def _network() -> Network:
    from gmmvit_deploy.models.families.t2t.model import T2T, drop_unused
    from gmmvit_deploy.models.layers.patches import unfold_as_convolution

    return Network(build=T2T, folding_passes=(unfold_as_convolution, drop_unused))


def _blocks(spec: T2TSpec) -> tuple[str, ...]:
    transformers = (f"token_transformers.{step}" for step in range(spec.token_layers))
    return (*transformers, *(f"blocks.{block}" for block in range(spec.depth)))


def _last_block(spec: T2TSpec) -> LastBlock | None:
    return last_of_blocks(spec) if spec.class_token else None  # without a class token, a norm precedes the mean


T2T = Family(
    name="t2t",
    spec=T2TSpec,
    network=_network,
    sources=(RELEASED,),
    presets=PRESETS,
    mask_kinds=("plain", "gmm", "elm"),
    last_block=_last_block,
    blocks=_blocks,
    default_resize="stretch-bilinear",
)
