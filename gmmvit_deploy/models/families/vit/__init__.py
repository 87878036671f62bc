"""ViT: a vision transformer on square images cut into square patches, with or without masks on attention.

The released codes (`sources.released`) write these tensors:

to_patch_embedding.1          linear layer on patches flattened in the order (row, column, channel)
pos_embedding, cls_token      (1, N, D); the class token in plain models only
transformer.layers.{i}.0      norm, fn.to_qkv, fn.to_out.0, fn.mask.{alpha,sigma,mask}
transformer.layers.{i}.1      norm, fn.net.0, fn.net.3
mlp_head.0, mlp_head.1        LayerNorm, linear
mask                          a second copy of the base mask, which the network never reads

The code of SPT and LSA writes the same names, and

to_patch_embedding.merging.{1,2}     with SPT: LayerNorm and linear layer, in place of to_patch_embedding.1
transformer.layers.{i}.0.fn.scale    with LSA: the temperature of each head

The PreNorm style of vit-pytorch gives a plain ViT the same names and shapes, without ``mask``. In vit-pytorch, the head
of a ViT with class token can also read the mean of all tokens, so a file without ``mask`` needs ``--set pool``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, cast

from gmmvit_deploy.models.families.family import Family, LastBlock, Network, last_of_blocks, plain_blocks
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.models.sources.released import (
    OPTION,
    PLAIN_FILES,
    block_names,
    patch_sizes,
    released_source,
    temperature_heads,
)
from gmmvit_deploy.models.sources.shapes import Shapes, asked_pool, infer_heads, infer_mask, known_pool, mask_heads
from gmmvit_deploy.models.sources.source import TensorOrigins, renamed
from gmmvit_deploy.models.specs import MaskSpec, PatchSpec, require, require_counts, require_no_mask_with

if TYPE_CHECKING:
    from gmmvit_deploy.models.layers.model import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class ViTSpec(PatchSpec):
    """A vision transformer on square images cut into square patches.

    class_token: True if a class token precedes the patches.
    pools_all: True if the head reads the mean of all tokens, including the class token. False if the head reads the
    class token, or the mean of the patches in a model without class token.
    spt, lsa: True for shifted patch tokenisation, and for locality self-attention, as in the formulas of the model.
    """

    family: ClassVar[str] = "vit"
    flags: ClassVar[tuple[str, ...]] = ("spt", "lsa", "pools_all")
    head_dim: int
    class_token: bool
    spt: bool = False
    lsa: bool = False
    pools_all: bool = False

    def __post_init__(self) -> None:
        PatchSpec.__post_init__(self)
        require_counts(self, "head_dim")
        require_no_mask_with(self, "spt", "lsa")
        require(
            not (self.class_token and self.mask.kind != "plain"),
            "a masked ViT has no class token, because the mask covers only the patch grid",
        )
        require(not self.lsa or self.tokens > 1, "lsa: expected at least 2 tokens, because no token attends to itself")
        require(
            self.class_token or not self.pools_all,
            "pools_all is for a model with a class token; without class token, the head reads the mean of the patches",
        )

    @property
    def pools_class_token(self) -> bool:
        """True if the head reads the class token, False if the head reads the mean of all tokens."""
        return self.class_token and not self.pools_all


def _spec(
    dim: int,
    depth: int,
    classes: int,
    image_size: int,
    mask: MaskSpec,
    *,
    heads: int = 12,
    patch_sizes: Mapping[int, int] = MappingProxyType({}),
) -> ViTSpec:
    """Return a preset.  patch_sizes: side of the images → side of a patch; else 8 for images of 64 pixels, or 4."""
    return ViTSpec(
        image_size=image_size,
        patch_size=patch_sizes.get(image_size, 8 if image_size == 64 else 4),
        classes=classes,
        dim=dim,
        depth=depth,
        heads=heads,
        head_dim=dim // heads,
        mlp_dim=2 * dim,
        class_token=mask.kind == "plain",
        mask=mask,
    )


PRESETS: Mapping[str, Callable[[int, int, MaskSpec], ViTSpec]] = {
    "vit": partial(_spec, 192, 9),  # the paper's ViT d9
    "vit-base": partial(_spec, 256, 8, heads=4, patch_sizes={32: 2}),
    "vit-heat": partial(_spec, 192, 8, heads=6, patch_sizes={32: 2, 64: 4}),
    "vit_d6": partial(_spec, 252, 6),
    "vit_d15": partial(_spec, 144, 15),
    "vit_d30": partial(_spec, 72, 30),
    "vit_d30*": partial(_spec, 108, 30),  # d30* in Table 3 of the paper
    "vit_d30**": partial(_spec, 192, 30),  # d30** in Table 4 of the paper
    "vit_d60": partial(_spec, 72, 60),
}


_LAYERS = "transformer.layers"
_FIRST = f"{_LAYERS}.0.0.fn"
_TEMPERATURE = r"transformer\.layers\.\d+\.0\.fn\.scale$"
_LINEAR, _SHIFTED = "to_patch_embedding.1", "to_patch_embedding.merging"
_ROOT_MASK = "mask"


def released_names(spec: ViTSpec, names: Iterable[str]) -> TensorOrigins:
    table = {
        "patch_embedding.norm": f"{_SHIFTED}.1",
        "patch_embedding.project": f"{_SHIFTED}.2" if spec.spt else _LINEAR,
        "position_embedding": "pos_embedding",
        "class_token": "cls_token",
        **block_names("blocks.{}", f"{_LAYERS}.{{}}"),
        "head_norm": "mlp_head.0",
        "head": "mlp_head.1",
    }
    return renamed(names, table)


def _shown_heads(shapes: Shapes, temperatures: int | None) -> tuple[int | None, str]:
    """Return the number of heads that the tensors show, or None, and the evidence for `infer_heads`."""
    if temperatures:
        return temperatures, "the number of temperatures in the file is"
    (heads,) = mask_heads(shapes, [f"{_FIRST}.mask"])
    if heads > 1:
        return heads, "the number of heads in the masks of the file is"
    width, dim = shapes.of(f"{_FIRST}.to_qkv.weight", rank=2)
    single = f"{_FIRST}.to_out.0.weight" not in shapes and width // 3 == dim
    return 1 if single else None, "the file has no output projection, so the number of heads is"


def infer_spec(shapes: Shapes, hints: LoadHints) -> ViTSpec:
    dim, patch_size, channels, spt = patch_sizes(shapes, _SHIFTED, linear=_LINEAR)
    temperatures = temperature_heads(shapes, f"{_FIRST}.scale", pattern=_TEMPERATURE)
    class_token = "cls_token" in shapes
    positions = shapes.of("pos_embedding", rank=3)[1] - int(class_token)
    grid = shapes.grid(positions, where="pos_embedding without the class token" if class_token else "pos_embedding")
    mask = infer_mask(shapes, hints, f"{_FIRST}.mask")
    pools_all = _pools_all(shapes, hints, class_token=class_token, spt_lsa=spt or temperatures is not None)
    inner_dim = shapes.of(f"{_FIRST}.to_qkv.weight", rank=2)[0] // 3
    classes = shapes.of("mlp_head.1.weight", rank=2)[0]
    heads = infer_heads(shapes, hints, width=inner_dim, shown=_shown_heads(shapes, temperatures), presets=PRESETS)
    return ViTSpec(
        image_size=grid * patch_size,
        patch_size=patch_size,
        classes=classes,
        dim=dim,
        depth=shapes.count(r"transformer\.layers\.(\d+)\.[01]\."),
        heads=heads,
        head_dim=inner_dim // heads,
        mlp_dim=shapes.of(f"{_LAYERS}.0.1.fn.net.0.weight", rank=2)[0],
        class_token=class_token,
        spt=spt,
        lsa=temperatures is not None,
        pools_all=pools_all,
        mask=mask.for_heads(heads),
        channels=channels,
    )


def _pools_all(shapes: Shapes, hints: LoadHints, *, class_token: bool, spt_lsa: bool) -> bool:
    """Return True if the head reads the mean of all tokens, including the class token."""
    if not class_token:
        known_pool(shapes.source, hints, pool="mean", evidence="the file has no class token, so the pooling is")
        return False
    if _ROOT_MASK in shapes:
        evidence = "the tensor mask shows the paper authors' code, whose pooling is"
    elif spt_lsa:
        evidence = "the tensors show the code of SPT and LSA, whose pooling is"
    elif hints.source == OPTION:
        evidence = f"the pooling of --set source={OPTION} is"
    else:
        return asked_pool(shapes.source, hints) == "mean"
    known_pool(shapes.source, hints, pool="cls", evidence=evidence)
    return False


RELEASED = released_source(
    signature=(r"to_patch_embedding\.(1\.weight$|merging\.)", r"transformer\.layers\."),
    spec=infer_spec,
    names=released_names,
    own_hints=("pool",),
    same_names={
        **PLAIN_FILES,
        "vit-pytorch": (*PLAIN_FILES[OPTION], r"to_patch_embedding\.merging\.", _TEMPERATURE),
    },
)


def _last_block(spec: ViTSpec) -> LastBlock:
    return last_of_blocks(spec, "first" if spec.pools_class_token else "mean")


def _other_pooling(model: Model) -> bool:
    spec = cast("ViTSpec", model.spec)
    if not spec.class_token:
        return False
    model.spec = replace(spec, pools_all=not spec.pools_all)
    return True


def _network() -> Network:
    from gmmvit_deploy.models.families.vit.model import ViT

    return Network(
        build=ViT, mistakes=(("class token and mean of the tokens exchanged in the pooling", _other_pooling),)
    )


VIT = Family(
    name="vit",
    spec=ViTSpec,
    network=_network,
    sources=(RELEASED,),
    presets=PRESETS,
    mask_kinds=("plain", "gmm", "elm"),
    blocks=plain_blocks,
    last_block=_last_block,
    default_resize="stretch-bilinear",
)
