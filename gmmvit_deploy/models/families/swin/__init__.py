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

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from gmmvit_deploy.models.families.family import Family, Network, Windows, stage_blocks
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.models.sources.released import (
    SHIFTED_NAMES,
    patch_sizes,
    released_source,
    score_names,
    temperature_heads,
)
from gmmvit_deploy.models.sources.shapes import Shapes, infer_heads, infer_mask
from gmmvit_deploy.models.sources.source import BLOCK_OF_TIMM, TensorOrigins, renamed, within
from gmmvit_deploy.models.specs import MaskSpec, StagesSpec, require, require_counts


@dataclass(frozen=True, slots=True, kw_only=True)
class SwinSpec(StagesSpec):
    """Swin: attention within windows that shift in blocks with an odd index; each later stage halves the grid.

    window: the number of tokens along a side of a window.
    """

    family: ClassVar[str] = "swin"
    window: int

    def __post_init__(self) -> None:
        StagesSpec.__post_init__(self)
        require_counts(self, "window")
        require(self.mask.kind != "elm", "a Swin supports no element-wise mask (ELM); expected plain or gmm")
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


def released_names(spec: SwinSpec, names: Iterable[str]) -> TensorOrigins:
    block, theirs = "stages.{}.blocks.{}", "layers.{}.blocks.{}"
    bias = {
        "table": "attn.relative_position_bias_table",
        "index": "attn.relative_position_index",
        "outside": "attn_mask",
    }
    merge = {"norm": "norm", "reduce": "reduction", **within("patches", "merging", SHIFTED_NAMES)}
    table = {
        "patch_embedding": "patch_embed.proj",
        "patch_norm": "patch_embed.norm",
        **within("patch_embedding", _SHIFTED, SHIFTED_NAMES),
        "position_embedding": "absolute_pos_embed",
        **within(block, theirs, BLOCK_OF_TIMM),
        **within(f"{block}.attention.scores.before.bias", theirs, bias),
        **score_names(f"{block}.attention", f"{theirs}.attn"),
        **within("stages.{}.merge", "layers.{}.downsample", merge),
        "norm": "norm",
        "head": "head",
    }
    return renamed(names, table)


def infer_spec(shapes: Shapes, hints: LoadHints) -> SwinSpec:
    """Infer the spec.  The number of heads follows from the relative position bias tables."""
    dim, patch_size, channels, spt = patch_sizes(shapes, _SHIFTED, convolution="patch_embed.proj")
    grid = shapes.grid(shapes.of("absolute_pos_embed", rank=3)[1], where="absolute_pos_embed")
    stages = shapes.count(r"layers\.(\d+)\.blocks\.")
    mask = infer_mask(shapes, hints, *(f"layers.{s}.blocks.0.attn.mask" for s in range(stages)))
    tables = [shapes.of(f"layers.{s}.blocks.0.attn.relative_position_bias_table", rank=2) for s in range(stages)]
    classes = shapes.of("head.weight", rank=2)[0]
    evidence = "the number of heads in the first position bias table of the file is"
    infer_heads(shapes, hints, width=dim, shown=(tables[0][1], evidence), presets=PRESETS)
    heads = [table[1] for table in tables]
    return SwinSpec(
        image_size=grid * patch_size,
        patch_size=patch_size,
        classes=classes,
        dim=dim,
        depths=tuple(shapes.count(rf"layers\.{s}\.blocks\.(\d+)\.") for s in range(stages)),
        heads=tuple(heads),
        window=(math.isqrt(tables[0][0]) + 1) // 2,  # the table has (2·window − 1)² rows
        mlp_dims=tuple(shapes.of(f"layers.{s}.blocks.0.mlp.fc1.weight", rank=2)[0] for s in range(stages)),
        mask=mask.for_heads(*heads),
        channels=channels,
        spt=spt,
        lsa=temperature_heads(shapes, "layers.0.blocks.0.attn.scale", pattern=_TEMPERATURE) is not None,
    )


RELEASED = released_source(
    signature=(r"patch_embed\.(proj\.weight$|merging\.)", r"absolute_pos_embed$", _TABLES),
    absent=(r"head\.fc\.",),  # timm's name of the head; other names of timm's Swin are the same
    spec=infer_spec,
    names=released_names,
    known_unused={"mask": "a second copy of the window's base mask, at the root of the file"},
)


def _network() -> Network:
    from gmmvit_deploy.models.families.swin.model import Swin, join_windows

    return Network(build=Swin, engine_passes=(join_windows,))


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
    blocks=_blocks,
    windows=_windows,
    default_resize="stretch-bilinear",
)
