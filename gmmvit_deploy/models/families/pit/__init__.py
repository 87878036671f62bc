"""PiT: a ViT with a class token, in several stages with pooling between the stages.

The released codes (`sources.released`) write these tensors:

to_patch_embedding.0 (convolution), pos_embedding (1, N+1, D), cls_token
layers.{0,2,4}.layers.{i}.{0,1}   blocks with the tensor names of a ViT
layers.{0,2,4}.mask               a second copy of the base mask, which the network never reads
layers.{1,3}                      downsample.net.{0,1} (depthwise and 1×1 convolution), cls_ff
mlp_head.{0,1}                    LayerNorm, linear

The code of SPT and LSA writes the same names, and

to_patch_embedding.merging.{1,2}             with SPT: LayerNorm and linear layer, in place of to_patch_embedding.0
layers.{1,3}                                 with SPT: merging.{1,2} for the patches, class_linear for the class token
layers.{0,2,4}.layers.{i}.0.fn.scale         with LSA: the temperature of each head
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from gmmvit_deploy.models.families.family import Family, LastBlock, Network, stage_blocks
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.models.sources.released import (
    SHIFTED_NAMES,
    block_names,
    patch_sizes,
    released_source,
    temperature_heads,
)
from gmmvit_deploy.models.sources.shapes import Shapes, infer_heads, infer_mask, mask_heads
from gmmvit_deploy.models.sources.source import TensorOrigins, renamed, within
from gmmvit_deploy.models.specs import MaskSpec, StagesSpec, require, require_counts


@dataclass(frozen=True, slots=True, kw_only=True)
class PiTSpec(StagesSpec):
    """PiT: a ViT with a class token in several stages; each later stage halves the grid and doubles the width.

    head_dim: the head dim, equal in all stages.
    """

    family: ClassVar[str] = "pit"
    head_dim: int

    def __post_init__(self) -> None:
        StagesSpec.__post_init__(self)
        require_counts(self, "head_dim")
        for grid in self.grids[:-1] if self.spt else ():
            require(grid % 2 == 0, f"spt: expected grids that patches of 2×2 tokens tile, got {grid}×{grid} tokens")

    @property
    def grids(self) -> tuple[int, ...]:
        """The number of patches along a side of the grid of each stage.  Half of an odd number is rounded up."""
        grids = [self.image_size // self.patch_size]
        for _ in self.depths[1:]:
            grids.append((grids[-1] + 1) // 2)
        return tuple(grids)


def _pit(classes: int, image_size: int, mask: MaskSpec) -> PiTSpec:
    return PiTSpec(
        image_size=image_size,
        patch_size=4 if image_size == 64 else 2,
        classes=classes,
        dim=96,
        depths=(2, 6, 4),
        heads=(2, 4, 8),
        head_dim=48,
        mlp_dims=(192, 384, 768),
        mask=mask,
    )


PRESETS: Mapping[str, Callable[[int, int, MaskSpec], PiTSpec]] = {"pit": _pit}


_BLOCKS = r"layers\.0\.layers\.0\."
_SHIFTED = "to_patch_embedding.merging"
_TEMPERATURE = r"layers\.\d+\.layers\.\d+\.0\.fn\.scale$"


def released_names(spec: PiTSpec, names: Iterable[str]) -> TensorOrigins:
    table = {
        "patch_embedding": "to_patch_embedding.0",
        **within("patch_embedding", _SHIFTED, SHIFTED_NAMES),
        "position_embedding": "pos_embedding",
        "class_token": "cls_token",
        **block_names("stages.{}.{}", "stages.{}.layers.{}", mask="mask.patches"),
        "poolings.{}.depthwise": "poolings.{}.downsample.net.0",
        "poolings.{}.pointwise": "poolings.{}.downsample.net.1",
        "poolings.{}.class_token": f"poolings.{{}}.{'class_linear' if spec.spt else 'cls_ff'}",
        **within("poolings.{}.merge.patches", "poolings.{}.merging", SHIFTED_NAMES),
        "head_norm": "mlp_head.0",
        "head": "mlp_head.1",
    }

    def layer(match: re.Match[str]) -> str:
        return f"layers.{2 * int(match[2]) + (match[1] == 'poolings')}."

    origins = renamed(names, table)
    return {ours: re.sub(r"^(stages|poolings)\.(\d+)\.", layer, str(theirs)) for ours, theirs in origins.items()}


def _shown_heads(
    shapes: Shapes, widths: list[int], in_masks: list[int], temperatures: int | None
) -> tuple[int | None, str]:
    """Return the number of heads of the first stage that the tensors show, or None, and the evidence.

    widths: the width of q in each stage.  in_masks: the number of heads in the masks of each stage.
    """
    if temperatures:
        return temperatures, "the number of temperatures in the first stage of the file is"
    dim = shapes.of("layers.0.layers.0.0.fn.to_qkv.weight", rank=2)[1]
    if "layers.0.layers.0.0.fn.to_out.0.weight" not in shapes and widths[0] == dim:
        return 1, "the first stage has no output projection, so the number of heads is"
    # A stage with per-head masks determines the head dim, which is equal in all stages.
    head_dim = next((width // heads for width, heads in zip(widths, in_masks, strict=True) if heads > 1), None)
    return head_dim and widths[0] // head_dim, "the number of heads in the first masks of the file is"


def infer_spec(shapes: Shapes, hints: LoadHints) -> PiTSpec:
    """Infer the spec.  The head dim is the same in all stages; ``--set heads`` is for the first stage."""
    dim, patch_size, channels, spt = patch_sizes(shapes, _SHIFTED, convolution="to_patch_embedding.0")
    grid = shapes.grid(shapes.of("pos_embedding", rank=3)[1] - 1, where="pos_embedding without the class token")
    stages = range((shapes.count(r"layers\.(\d+)\.layers\.") + 1) // 2)
    masks = [f"layers.{2 * s}.layers.0.0.fn.mask" for s in stages]
    mask = infer_mask(shapes, hints, *masks)
    widths = [shapes.of(f"layers.{2 * s}.layers.0.0.fn.to_qkv.weight", rank=2)[0] // 3 for s in stages]
    classes = shapes.of("mlp_head.1.weight", rank=2)[0]
    temperatures = temperature_heads(shapes, "layers.0.layers.0.0.fn.scale", pattern=_TEMPERATURE)
    shown = _shown_heads(shapes, widths, mask_heads(shapes, masks), temperatures)
    head_dim = widths[0] // infer_heads(shapes, hints, width=widths[0], shown=shown, presets=PRESETS)
    heads = tuple(width // head_dim for width in widths)
    return PiTSpec(
        image_size=grid * patch_size,
        patch_size=patch_size,
        classes=classes,
        dim=dim,
        depths=tuple(shapes.count(rf"layers\.{2 * s}\.layers\.(\d+)\.") for s in stages),
        heads=heads,
        head_dim=head_dim,
        mlp_dims=tuple(shapes.of(f"layers.{2 * s}.layers.0.1.fn.net.0.weight", rank=2)[0] for s in stages),
        mask=mask.for_heads(*heads),
        channels=channels,
        spt=spt,
        lsa=temperatures is not None,
    )


RELEASED = released_source(
    signature=(_BLOCKS,),
    spec=infer_spec,
    names=released_names,
    known_unused={r"layers\.\d+\.mask": "a second copy of the stage's base mask"},
)


def _network() -> Network:
    from gmmvit_deploy.models.families.pit.model import PiT

    return Network(build=PiT)


def _blocks(spec: PiTSpec) -> tuple[str, ...]:
    return stage_blocks(spec.depths, block="{}", between="poolings.{}")


def _last_block(spec: PiTSpec) -> LastBlock:
    return LastBlock(
        name=f"stages.{len(spec.depths) - 1}.{spec.depths[-1] - 1}", reads="first", tokens=spec.grids[-1] ** 2 + 1
    )


PIT = Family(
    name="pit",
    spec=PiTSpec,
    network=_network,
    sources=(RELEASED,),
    presets=PRESETS,
    mask_kinds=("plain", "gmm", "elm"),
    blocks=_blocks,
    last_block=_last_block,
    default_resize="stretch-bilinear",
)
