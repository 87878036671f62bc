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

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from gmmvit_deploy.errors import CheckpointError
from gmmvit_deploy.models.families.family import Family, LastBlock, Network, stage_blocks
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.models.sources.released import (
    VIEWS,
    block_names,
    has_shifted,
    released_source,
    shifted_names,
    temperature_heads,
)
from gmmvit_deploy.models.sources.shapes import Shapes, infer_heads, infer_mask, mask_heads
from gmmvit_deploy.models.sources.source import tensors_of_layers
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
class PiTSpec(ModelSpec):
    """PiT: a ViT with a class token in several stages; each later stage halves the grid and doubles the width.

    dim: the width of the first stage.  head_dim: the head dim, equal in all stages.
    depths, heads, mlp_dims: the number of blocks, the number of heads and the mlp width of each stage.
    spt, lsa: True for shifted patch tokenisation, and for locality self-attention, as in the formulas of the model.
    """

    family: ClassVar[str] = "pit"
    flags: ClassVar[tuple[str, ...]] = ("spt", "lsa")
    patch_size: int
    dim: int
    depths: tuple[int, ...]
    heads: tuple[int, ...]
    head_dim: int
    mlp_dims: tuple[int, ...]
    spt: bool = False
    lsa: bool = False

    def __post_init__(self) -> None:
        ModelSpec.__post_init__(self)
        require_counts(self, "patch_size", "dim", "depths", "heads", "head_dim", "mlp_dims")
        require_tiling(self.image_size, self.patch_size)
        require_stages(self.depths, self.heads, self.mlp_dims)
        require_no_mask_with(self, "spt", "lsa")
        for grid in self.grids[:-1] if self.spt else ():
            require(grid % 2 == 0, f"spt: expected grids that patches of 2×2 tokens tile, got {grid}×{grid} tokens")

    @property
    def grids(self) -> tuple[int, ...]:
        """The number of patches along a side of the grid of each stage.  Half of an odd number is rounded up."""
        grids = [self.image_size // self.patch_size]
        for _ in self.depths[1:]:
            grids.append((grids[-1] + 1) // 2)
        return tuple(grids)

    @property
    def dims(self) -> tuple[int, ...]:
        return tuple(self.dim << stage for stage in range(len(self.depths)))


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


def released_names(spec: PiTSpec) -> dict[str, str]:
    pairs = {"head_norm": "mlp_head.0", "head": "mlp_head.1"}
    names = {"position_embedding": "pos_embedding", "class_token": "cls_token"}
    if spec.spt:
        names |= shifted_names("patch_embedding", _SHIFTED)
    else:
        pairs["patch_embedding"] = "to_patch_embedding.0"
    for s, depth in enumerate(spec.depths):
        projects = not (spec.heads[s] == 1 and spec.head_dim == spec.dims[s])
        for i in range(depth):
            ours, theirs = f"stages.{s}.{i}", f"layers.{2 * s}.layers.{i}"
            names |= block_names(ours, theirs, mask=spec.mask, mask_at="mask.patches", projects=projects)
            if spec.lsa:
                names[f"{ours}.attention.scores.before.temperature.temperature"] = f"{theirs}.0.fn.scale"
        if s < len(spec.depths) - 1 and spec.spt:
            pairs[f"poolings.{s}.class_token"] = f"layers.{2 * s + 1}.class_linear"
            names |= shifted_names(f"poolings.{s}.merge.patches", f"layers.{2 * s + 1}.merging")
        elif s < len(spec.depths) - 1:
            pairs |= {
                f"poolings.{s}.depthwise": f"layers.{2 * s + 1}.downsample.net.0",
                f"poolings.{s}.pointwise": f"layers.{2 * s + 1}.downsample.net.1",
                f"poolings.{s}.class_token": f"layers.{2 * s + 1}.cls_ff",
            }
    return names | tensors_of_layers(pairs)


def known_unused(spec: PiTSpec) -> dict[str, str]:
    return {f"layers.{2 * s}.mask": "a second copy of the stage's base mask" for s in range(len(spec.depths))}


def _first_heads(widths: list[int], spoken: list[int]) -> int | None:
    """Return the number of heads of the first stage, or None if no mask determines this number.

    A stage with per-head masks determines the head dim, which is equal in all stages.
    widths: the width of q in each stage.
    spoken: the number of heads in the masks of each stage; 1 for a shared, single-head or missing mask.
    """
    telling = [(width, heads) for width, heads in zip(widths, spoken, strict=True) if heads > 1]
    if not telling or telling[0][0] % telling[0][1]:
        return None
    head_dim = telling[0][0] // telling[0][1]
    return widths[0] // head_dim if widths[0] % head_dim == 0 else None


def _stages(shapes: Shapes) -> int:
    return (shapes.count(r"layers\.(\d+)\.layers\.") + 1) // 2


def _spoken(shapes: Shapes, stages: int) -> list[int]:
    """Return the number of heads in the masks of each stage; 1 for a shared, single-head or missing mask."""
    return mask_heads(shapes, [f"layers.{2 * s}.layers.0.0.fn.mask" for s in range(stages)])


def _widths(shapes: Shapes, stages: int) -> list[int]:
    """Return the width of q in each stage."""
    return [shapes.of(f"layers.{2 * s}.layers.0.0.fn.to_qkv.weight", rank=2)[0] // 3 for s in range(stages)]


def _temperatures(shapes: Shapes, stages: int) -> tuple[int, ...] | None:
    names = [f"layers.{2 * s}.layers.0.0.fn.scale" for s in range(stages)]
    return temperature_heads(shapes, names, pattern=_TEMPERATURE)


def shown_heads(shapes: Shapes, hints: LoadHints) -> tuple[int | None, str]:
    """Return the number of heads of the first stage that the tensors show, or None, and the evidence."""
    stages = _stages(shapes)
    if temperatures := _temperatures(shapes, stages):
        return temperatures[0], "the number of temperatures in the first stage of the file is"
    widths = _widths(shapes, stages)
    dim = shapes.of("layers.0.layers.0.0.fn.to_qkv.weight", rank=2)[1]
    if "layers.0.layers.0.0.fn.to_out.0.weight" not in shapes and widths[0] == dim:
        return 1, "the first stage has no output projection, so the number of heads is"
    return _first_heads(widths, _spoken(shapes, stages)), "the number of heads in the first masks of the file is"


def infer_spec(shapes: Shapes, hints: LoadHints) -> PiTSpec:
    """Infer the spec.  The head dim is the same in all stages; ``--set heads`` is for the first stage."""
    source = shapes.source
    spt = has_shifted(shapes, _SHIFTED)
    dim, patch_size, channels = (
        shapes.linear_patch(f"{_SHIFTED}.2.weight", views=VIEWS)
        if spt
        else shapes.convolution_patch("to_patch_embedding.0.weight")
    )
    grid = shapes.grid(shapes.of("pos_embedding", rank=3)[1] - 1, where="pos_embedding without the class token")
    stages = _stages(shapes)
    mask, _ = infer_mask(shapes, hints, "layers.0.layers.0.0.fn.mask")
    spoken, widths = _spoken(shapes, stages), _widths(shapes, stages)
    classes = shapes.of("mlp_head.1.weight", rank=2)[0]
    temperatures = _temperatures(shapes, stages)
    head_dim = widths[0] // infer_heads(
        shapes, hints, width=widths[0], shown=shown_heads(shapes, hints), presets=PRESETS
    )
    if any(width % head_dim for width in widths):
        raise CheckpointError(
            f"{source}: expected the width of q in every stage to be a multiple of the head dim {head_dim}, "
            f"got {widths}"
        )
    heads = tuple(width // head_dim for width in widths)
    # In a stage with a single head, a shared mask and a per-head mask have the same shape. The masks are shared if
    # every mask is for a single head although at least one stage has several heads.
    mask = replace(mask, shared=mask.kind == "gmm" and set(spoken) == {1} and set(heads) != {1})
    return PiTSpec(
        image_size=grid * patch_size,
        patch_size=patch_size,
        classes=classes,
        dim=dim,
        depths=tuple(shapes.count(rf"layers\.{2 * s}\.layers\.(\d+)\.") for s in range(stages)),
        heads=heads,
        head_dim=head_dim,
        mlp_dims=tuple(shapes.of(f"layers.{2 * s}.layers.0.1.fn.net.0.weight", rank=2)[0] for s in range(stages)),
        mask=mask,
        channels=channels,
        spt=spt,
        lsa=temperatures is not None,
    )


RELEASED = released_source(
    signature=(_BLOCKS,),
    spec=infer_spec,
    names=released_names,
    shown_heads=shown_heads,
    known_unused=known_unused,
)


def _network() -> Network:
    from gmmvit_deploy.models.families.pit.model import PiT

    return Network(build=PiT)


def _small(mask: MaskSpec) -> PiTSpec:
    return PiTSpec(
        image_size=16,
        patch_size=4,
        classes=5,
        dim=32,
        depths=(2, 1),
        heads=(2, 4),
        head_dim=16,
        mlp_dims=(48, 64),
        mask=mask,
    )


def _variants() -> Mapping[str, PiTSpec]:
    return {"spt-lsa": replace(_small(MaskSpec()), spt=True, lsa=True)}


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
    small=_small,
    variants=_variants,
    blocks=_blocks,
    last_block=_last_block,
    default_resize="stretch-bilinear",
)
