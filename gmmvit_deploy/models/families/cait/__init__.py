"""CaiT: a vision transformer with head mixing, LayerScale, and class blocks after the patch blocks.

The paper is "Toward a Deeper Understanding: RetNet Viewed through Convolution".  Its authors' code writes

to_patch_embedding.1, pos_embedding (patches only), cls_token
{patch,cls}_transformer.layers.{i}.0   scale, fn.norm, fn.fn.{to_q,to_kv,to_out.0},
                                       fn.fn.mix_heads_{pre,post}_attn, fn.fn.mask.{alpha,sigma,mask}
{patch,cls}_transformer.layers.{i}.1   scale, fn.norm, fn.fn.net.{0,3}
mlp_head.{0,1}                         LayerNorm, linear
mask                                   a second copy of the base mask, which the network never reads

The released code of SPT and LSA ("Vision Transformer for Small-Size Datasets") writes the same names, and

to_patch_embedding.0.merging.{1,2}                   with SPT: LayerNorm and linear layer
{patch,cls}_transformer.layers.{i}.0.fn.fn.scale     with LSA: the temperature of each head

vit-pytorch's PreNorm style has the names of the paper authors' code; in its other style, the branches hold their norms:

{patch,cls}_transformer.layers.{i}.0   scale, fn.norm, fn.{to_q,to_kv,to_out.0}, fn.mix_heads_{pre,post}_attn
{patch,cls}_transformer.layers.{i}.1   scale, fn.net.0 (the norm), fn.net.1, fn.net.4

In vit-pytorch, the class token of a class block attends to its normed self and to the patches; in the other codes, to
the patches only. No tensor shows the difference: only the paper authors' code writes ``mask`` at the root, so for a
PreNorm file without it the user types ``--set source``. The patch embedding of vit-pytorch's later releases has norms
(to_patch_embedding.1 and .3); the code of SPT and LSA has no such norms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from gmmvit_deploy.models.families.family import Family, Network
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.models.sources.released import patch_sizes, released_source, score_names, temperature_heads
from gmmvit_deploy.models.sources.shapes import Shapes, image_of_patches, infer_heads, infer_mask
from gmmvit_deploy.models.sources.source import CheckpointSource, TensorOrigins, renamed, within
from gmmvit_deploy.models.specs import MaskSpec, PatchSpec, require_counts, require_no_mask_with


@dataclass(frozen=True, slots=True, kw_only=True)
class CaiTSpec(PatchSpec):
    """CaiT: patch blocks with optional masks and head mixing, then class blocks with head mixing.

    depth, class_depth: the number of patch blocks and of class blocks.
    spt, lsa: True for shifted patch tokenisation, and for locality self-attention, as in the formulas of the model.
    normed_patches: True if norms surround the linear layer of the patch embedding, as in vit-pytorch.
    attends_to_itself: True if the class token attends to its normed self and to the patches, as in vit-pytorch.
    """

    family: ClassVar[str] = "cait"
    flags: ClassVar[tuple[str, ...]] = ("spt", "lsa", "normed_patches", "attends_to_itself")
    class_depth: int
    head_dim: int
    spt: bool = False
    lsa: bool = False
    normed_patches: bool = False
    attends_to_itself: bool = False

    def __post_init__(self) -> None:
        PatchSpec.__post_init__(self)
        require_counts(self, "class_depth", "head_dim")
        require_no_mask_with(self, "spt", "lsa")

    @property
    def tokens(self) -> int:
        """N: the number of tokens of the patch blocks, without the class token."""
        return self.grid**2


def _spec(dim: int, classes: int, image_size: int, mask: MaskSpec) -> CaiTSpec:
    return CaiTSpec(
        image_size=image_size,
        patch_size=8 if image_size == 64 else 4,
        classes=classes,
        dim=dim,
        depth=24,
        class_depth=2,
        heads=4,
        head_dim=64,
        mlp_dim=384,
        mask=mask,
    )


PRESETS: Mapping[str, Callable[[int, int, MaskSpec], CaiTSpec]] = {
    "cait": partial(_spec, 192),
    "cait-tiny": partial(_spec, 108),
}


_PATCH, _CLASS = "patch_transformer.layers", "cls_transformer.layers"
_LINEAR, _SHIFTED = "to_patch_embedding.1", "to_patch_embedding.0.merging"
_TEMPERATURE = r"(patch|cls)_transformer\.layers\.\d+\.0\.fn\.fn\.scale$"


def released_names(spec: CaiTSpec, names: Iterable[str], *, norm_inside: bool = False) -> TensorOrigins:
    """norm_inside: as for `infer_vit_pytorch_spec`."""
    attention = "0.fn" if norm_inside else "0.fn.fn"
    mlp = ("net.0", "net.1", "net.4") if norm_inside else ("norm", "fn.net.0", "fn.net.3")
    block = {
        "attention.norm": "0.fn.norm",
        "attention.gamma": "0.scale",
        "attention.inner.query": f"{attention}.to_q",
        "attention.inner.key_value": f"{attention}.to_kv",
        "attention.inner.scores.before.mixing.weight": f"{attention}.mix_heads_pre_attn",
        "attention.inner.scores.after.mixing.weight": f"{attention}.mix_heads_post_attn",
        "attention.inner.out": f"{attention}.to_out.0",
        **score_names("attention.inner", attention),
        "mlp.gamma": "1.scale",
        "mlp.norm": f"1.fn.{mlp[0]}",
        "mlp.inner.0": f"1.fn.{mlp[1]}",
        "mlp.inner.2": f"1.fn.{mlp[2]}",
    }
    linear = "to_patch_embedding.2" if spec.normed_patches else _LINEAR
    table = {
        "patch_embedding.patch_norm": "to_patch_embedding.1",
        "patch_embedding.project": f"{_SHIFTED}.2" if spec.spt else linear,
        "patch_embedding.token_norm": "to_patch_embedding.3",
        "patch_embedding.norm": f"{_SHIFTED}.1",
        "position_embedding": "pos_embedding",
        "class_token": "cls_token",
        **within("patch_blocks.{}", f"{_PATCH}.{{}}", block),
        **within("class_blocks.{}", f"{_CLASS}.{{}}", block),
        "head_norm": "mlp_head.0",
        "head": "mlp_head.1",
    }
    return renamed(names, table)


def infer_spec(shapes: Shapes, hints: LoadHints) -> CaiTSpec:
    """Infer the spec of a file of the paper authors' code, or of the code of SPT and LSA."""
    first = f"{_PATCH}.0.0.fn.fn"
    dim, patch_size, channels, spt = patch_sizes(shapes, _SHIFTED, linear=_LINEAR)
    grid = shapes.grid(shapes.of("pos_embedding", rank=3)[1], where="pos_embedding")
    mask = infer_mask(shapes, hints, f"{first}.mask")
    sizes = _sizes(shapes, hints, first, f"{_PATCH}.0.1.fn.fn.net.0", presets=PRESETS)
    return CaiTSpec(
        **sizes,
        image_size=grid * patch_size,
        patch_size=patch_size,
        dim=dim,
        mask=mask.for_heads(sizes["heads"]),
        channels=channels,
        spt=spt,
        lsa=temperature_heads(shapes, f"{first}.scale", pattern=_TEMPERATURE) is not None,
    )


def _sizes(
    shapes: Shapes, hints: LoadHints, first: str, hidden: str, *, presets: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the fields that files of all codes show.  first: the first attention.  hidden: its mlp's first layer."""
    inner_dim = shapes.of(f"{first}.to_q.weight", rank=2)[0]
    mixed = shapes.of(f"{first}.mix_heads_pre_attn", rank=2)[0]
    evidence = "the number of heads in the head mixing matrices of the file is"
    classes = shapes.of("mlp_head.1.weight", rank=2)[0]
    heads = infer_heads(shapes, hints, width=inner_dim, shown=(mixed, evidence), presets=presets)
    return {
        "classes": classes,
        "depth": shapes.count(r"patch_transformer\.layers\.(\d+)\."),
        "class_depth": shapes.count(r"cls_transformer\.layers\.(\d+)\."),
        "heads": heads,
        "head_dim": inner_dim // heads,
        "mlp_dim": shapes.of(f"{hidden}.weight", rank=2)[0],
    }


def infer_vit_pytorch_spec(shapes: Shapes, hints: LoadHints, *, norm_inside: bool) -> CaiTSpec:
    """Infer the spec of a file of vit-pytorch.  norm_inside: True if the attention and the mlp contain their norms."""
    normed = any(f"to_patch_embedding.{index}.weight" in shapes for index in (2, 3))
    linear = f"to_patch_embedding.{2 if normed else 1}"
    dim, values = shapes.of(f"{linear}.weight", rank=2)
    grid = shapes.grid(shapes.of("pos_embedding", rank=3)[1], where="pos_embedding")
    image_size, channels, patch_size = image_of_patches(shapes.source, hints, name=linear, values=values, grid=grid)
    branch, hidden = ("fn", "fn.net.1") if norm_inside else ("fn.fn", "fn.fn.net.0")
    return CaiTSpec(
        **_sizes(shapes, hints, f"{_PATCH}.0.0.{branch}", f"{_PATCH}.0.1.{hidden}"),
        image_size=image_size,
        channels=channels,
        patch_size=patch_size,
        dim=dim,
        normed_patches=normed,
        attends_to_itself=True,
        mask=MaskSpec(),
    )


_LAYERS = r"patch_transformer\.layers"
_PRENORM_NAMES = (_LAYERS, rf"{_LAYERS}\.0\.0\.fn\.fn\.")
_OF_OTHER_CODES = (r"mask$", rf"{_LAYERS}\.\d+\.0\.fn\.fn\.(mask\.|scale$)", r"to_patch_embedding\.0\.")

RELEASED = released_source(signature=(_LAYERS,), spec=infer_spec, names=released_names)
SPT_LSA_PLAIN = CheckpointSource(
    name="the CaiT of SPT_LSA",
    signature=_PRENORM_NAMES,
    absent=(*_OF_OTHER_CODES, r"to_patch_embedding\.[23]\."),
    spec=infer_spec,
    tensors=released_names,
    option="spt-lsa",
)
PRENORM = CheckpointSource(
    name="vit-pytorch's CaiT in the PreNorm style",
    signature=_PRENORM_NAMES,
    absent=_OF_OTHER_CODES,
    spec=partial(infer_vit_pytorch_spec, norm_inside=False),
    tensors=released_names,
    option="vit-pytorch",
)
VIT_PYTORCH = CheckpointSource(
    name="vit-pytorch's CaiT",
    signature=(_LAYERS, rf"{_LAYERS}\.0\.0\.fn\.to_q\."),
    spec=partial(infer_vit_pytorch_spec, norm_inside=True),
    tensors=partial(released_names, norm_inside=True),
    option="vit-pytorch",
)


def _network() -> Network:
    from gmmvit_deploy.models.families.cait.folding import drop_remainder, merge_layer_scale, widen_heads
    from gmmvit_deploy.models.families.cait.model import MISTAKES, CaiT

    return Network(
        build=CaiT,
        folding_passes=(drop_remainder, merge_layer_scale),
        engine_passes=(widen_heads,),
        mistakes=MISTAKES,
    )


def _blocks(spec: CaiTSpec) -> tuple[str, ...]:
    patches = (f"patch_blocks.{block}" for block in range(spec.depth))
    return ("patch_embedding", *patches, *(f"class_blocks.{block}" for block in range(spec.class_depth)))


CAIT = Family(
    name="cait",
    spec=CaiTSpec,
    network=_network,
    sources=(RELEASED, SPT_LSA_PLAIN, PRENORM, VIT_PYTORCH),
    presets=PRESETS,
    mask_kinds=("plain", "gmm", "elm"),
    blocks=_blocks,
    default_resize="stretch-bilinear",
)
