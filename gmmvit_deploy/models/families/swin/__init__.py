"""Swin: attention within windows that shift in every other block, with or without Gaussian mixture masks.

The released codes (`sources.released`) write these tensors:

patch_embed.{proj,norm}, absolute_pos_embed
layers.{s}.blocks.{b}         norm1, attn.{qkv,proj}, attn.relative_position_{bias_table,index},
                              attn.mask.{alpha,sigma,mask}, attn_mask (in shifted blocks), norm2, mlp.{fc1,fc2}
layers.{s}.downsample         norm, reduction
norm, head
mask                          a second copy of the base mask of a window, which the network never reads

The code of SPT and LSA writes the same names, and

patch_embed.merging.{1,2}             with SPT: LayerNorm and linear layer, in place of patch_embed.{proj,norm}
layers.{s}.downsample.merging.{1,2}   with SPT: LayerNorm and linear layer, in place of norm and reduction
layers.{s}.blocks.{b}.attn.scale      with LSA: the temperature of each head
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from gmmvit_deploy.errors import CheckpointError
from gmmvit_deploy.models.families.family import Family, Network, Windows, stage_blocks
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.models.sources.released import (
    VIEWS,
    has_shifted,
    mask_names,
    released_source,
    shifted_names,
    temperature_heads,
)
from gmmvit_deploy.models.sources.shapes import Shapes, exact_root, infer_heads, infer_mask, mask_heads
from gmmvit_deploy.models.sources.source import BLOCK_OF_TIMM, tensors_of_layers
from gmmvit_deploy.models.specs import (
    MaskSpec,
    ModelSpec,
    require,
    require_counts,
    require_no_mask_with,
    require_stages,
    require_tiling,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SwinSpec(ModelSpec):
    """Swin: attention within windows that shift in blocks with an odd index; each later stage halves the grid.

    window: the number of tokens along a side of a window.
    dim: the width of the first stage; the width doubles from stage to stage.
    depths, heads, mlp_dims: the number of blocks, the number of heads and the mlp width of each stage.
    spt, lsa: True for shifted patch tokenisation, and for locality self-attention, as in the formulas of the model.
    """

    family: ClassVar[str] = "swin"
    flags: ClassVar[tuple[str, ...]] = ("spt", "lsa")
    patch_size: int
    dim: int
    depths: tuple[int, ...]
    heads: tuple[int, ...]
    window: int
    mlp_dims: tuple[int, ...]
    spt: bool = False
    lsa: bool = False

    def __post_init__(self) -> None:
        ModelSpec.__post_init__(self)
        require_counts(self, "patch_size", "dim", "depths", "heads", "window", "mlp_dims")
        require_tiling(self.image_size, self.patch_size)
        require_stages(self.depths, self.heads, self.mlp_dims)
        require(self.mask.kind != "elm", "a Swin supports no element-wise mask (ELM); expected plain or gmm")
        require_no_mask_with(self, "spt", "lsa")
        require(
            not self.lsa or self.window > 1, "lsa: expected windows of at least 2×2 tokens: no token attends to itself"
        )
        for stage, heads in enumerate(self.heads):
            grid, dim = self.grids[stage], self.dims[stage]
            require(dim % heads == 0, f"stage {stage}: the width {dim} is not a multiple of {heads} heads")
            require(
                grid % self.window == 0 and grid >= self.window,
                f"stage {stage}: windows of {self.window}×{self.window} tokens do not tile the {grid}×{grid} grid",
            )

    @property
    def grids(self) -> tuple[int, ...]:
        """The number of tokens along a side of the grid of each stage."""
        return tuple((self.image_size // self.patch_size) >> stage for stage in range(len(self.depths)))

    @property
    def dims(self) -> tuple[int, ...]:
        return tuple(self.dim << stage for stage in range(len(self.depths)))

    def shift(self, stage: int, block: int) -> int:
        """Return by how many tokens a block with an odd index rolls the grid, if its stage has several windows."""
        return self.window // 2 if block % 2 and self.grids[stage] > self.window else 0


def _swin(classes: int, image_size: int, mask: MaskSpec) -> SwinSpec:
    return SwinSpec(
        image_size=image_size,
        patch_size=4 if image_size == 64 else 2,
        classes=classes,
        dim=96,
        depths=(2, 6, 4),
        heads=(3, 6, 12),
        window=4,
        mlp_dims=(192, 384, 768),
        mask=mask,
    )


PRESETS: Mapping[str, Callable[[int, int, MaskSpec], SwinSpec]] = {"swin": _swin}


_SHIFTED = "patch_embed.merging"
_TEMPERATURE = r"layers\.\d+\.blocks\.\d+\.attn\.scale$"
_TABLES = r".*relative_position_bias_table"


def released_names(spec: SwinSpec) -> dict[str, str]:
    pairs = {"norm": "norm", "head": "head"}
    names = {"position_embedding": "absolute_pos_embed"}
    if spec.spt:
        names |= shifted_names("patch_embedding", _SHIFTED)
    else:
        pairs |= {"patch_embedding": "patch_embed.proj", "patch_norm": "patch_embed.norm"}
    for s, depth in enumerate(spec.depths):
        for b in range(depth):
            ours, theirs = f"stages.{s}.blocks.{b}", f"layers.{s}.blocks.{b}"
            pairs |= {f"{ours}.{a}": f"{theirs}.{z}" for a, z in BLOCK_OF_TIMM.items()}
            scores = f"{ours}.attention.scores"
            names[f"{scores}.before.bias.table"] = f"{theirs}.attn.relative_position_bias_table"
            names[f"{scores}.before.bias.index"] = f"{theirs}.attn.relative_position_index"
            if spec.shift(s, b):
                names[f"{scores}.before.bias.outside"] = f"{theirs}.attn_mask"
            names |= mask_names(spec.mask, f"{scores}.before.mask", f"{theirs}.attn.mask")
            if spec.lsa:
                names[f"{scores}.before.temperature.temperature"] = f"{theirs}.attn.scale"
        if s < len(spec.depths) - 1 and spec.spt:
            names |= shifted_names(f"stages.{s}.merge.patches", f"layers.{s}.downsample.merging")
        elif s < len(spec.depths) - 1:
            pairs[f"stages.{s}.merge.norm"] = f"layers.{s}.downsample.norm"
            names[f"stages.{s}.merge.reduce.weight"] = f"layers.{s}.downsample.reduction.weight"
    return names | tensors_of_layers(pairs)


def known_unused(spec: SwinSpec) -> dict[str, str]:
    return {"mask": "a second copy of the window's base mask, at the root of the file"}


def infer_spec(shapes: Shapes, hints: LoadHints) -> SwinSpec:
    """Infer the spec.  The number of heads follows from the relative position bias tables."""
    source = shapes.source
    spt = has_shifted(shapes, _SHIFTED)
    dim, patch_size, channels = (
        shapes.linear_patch(f"{_SHIFTED}.2.weight", views=VIEWS)
        if spt
        else shapes.convolution_patch("patch_embed.proj.weight")
    )
    grid = shapes.grid(shapes.of("absolute_pos_embed", rank=3)[1], where="absolute_pos_embed")
    stages = shapes.count(r"layers\.(\d+)\.blocks\.")
    mask, _ = infer_mask(shapes, hints, "layers.0.blocks.0.attn.mask")
    if mask.kind == "elm":
        raise CheckpointError(f"{source}: the file has an element-wise mask (ELM), which a Swin does not support")
    tables = [shapes.of(f"layers.{s}.blocks.0.attn.relative_position_bias_table", rank=2) for s in range(stages)]
    offsets = exact_root(tables[0][0])
    if offsets is None or offsets % 2 == 0:
        raise CheckpointError(f"{source}: the position bias table has {tables[0][0]} rows; expected (2·window − 1)²")
    classes = shapes.of("head.weight", rank=2)[0]
    evidence = "the number of heads in the first position bias table of the file is"
    infer_heads(shapes, hints, width=dim, shown=(tables[0][1], evidence), presets=PRESETS)
    heads = [table[1] for table in tables]
    spoken = mask_heads(shapes, [f"layers.{s}.blocks.0.attn.mask" for s in range(stages)])
    # In a stage with a single head, a shared mask and a per-head mask have the same shape. The masks are shared if
    # every mask is for a single head although at least one stage has several heads.
    mask = replace(mask, shared=mask.kind == "gmm" and set(spoken) == {1} and set(heads) != {1})
    return SwinSpec(
        image_size=grid * patch_size,
        patch_size=patch_size,
        classes=classes,
        dim=dim,
        depths=tuple(shapes.count(rf"layers\.{s}\.blocks\.(\d+)\.") for s in range(stages)),
        heads=tuple(heads),
        window=(offsets + 1) // 2,
        mlp_dims=tuple(shapes.of(f"layers.{s}.blocks.0.mlp.fc1.weight", rank=2)[0] for s in range(stages)),
        mask=mask,
        channels=channels,
        spt=spt,
        lsa=temperature_heads(shapes, ["layers.0.blocks.0.attn.scale"], pattern=_TEMPERATURE) is not None,
    )


RELEASED = released_source(
    signature=(r"patch_embed\.(proj\.weight$|merging\.)", r"absolute_pos_embed$", _TABLES),
    absent=(r"head\.fc\.",),  # timm's name of the head; other names of timm's Swin are the same
    spec=infer_spec,
    names=released_names,
    known_unused=known_unused,
)


def _network() -> Network:
    from gmmvit_deploy.models.families.swin.model import Swin, join_windows

    return Network(build=Swin, engine_passes=(join_windows,))


def _small(mask: MaskSpec) -> SwinSpec:
    return SwinSpec(
        image_size=16,
        patch_size=2,
        classes=5,
        dim=32,
        depths=(2, 1),
        heads=(2, 4),
        window=4,
        mlp_dims=(48, 64),
        mask=mask,
    )


def _variants() -> Mapping[str, SwinSpec]:
    return {"spt-lsa": replace(_small(MaskSpec()), depths=(2, 2), spt=True, lsa=True)}


def _blocks(spec: SwinSpec) -> tuple[str, ...]:
    return stage_blocks(spec.depths, between="stages.{}.merge")


def _windows(spec: SwinSpec) -> Mapping[str, Windows]:
    return {
        f"stages.{stage}.blocks.{block}.attention": Windows(
            grid=spec.grids[stage], window=spec.window, shift=spec.shift(stage, block)
        )
        for stage, depth in enumerate(spec.depths)
        for block in range(depth)
    }


SWIN = Family(
    name="swin",
    spec=SwinSpec,
    network=_network,
    sources=(RELEASED,),
    presets=PRESETS,
    mask_kinds=("plain", "gmm"),
    small=_small,
    variants=_variants,
    blocks=_blocks,
    windows=_windows,
    default_resize="stretch-bilinear",
)
