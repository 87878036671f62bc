"""CaiT checkpoints of the paper authors' released training code: the names of the tensors, and how to infer the spec.

The paper is "Toward a Deeper Understanding: RetNet Viewed through Convolution".

to_patch_embedding.1, pos_embedding (patches only), cls_token
{patch,cls}_transformer.layers.{i}.0   scale, fn.norm, fn.fn.{to_q,to_kv,to_out.0},
                                       fn.fn.mix_heads_{pre,post}_attn, fn.fn.mask.{alpha,sigma,mask}
{patch,cls}_transformer.layers.{i}.1   scale, fn.norm, fn.fn.net.{0,3}
mlp_head.{0,1}                         LayerNorm, linear
mask                                   a second copy of the base mask, which the network never reads

Checkpoints of the released code of SPT and LSA ("Vision Transformer for Small-Size Datasets") have the same names, and

to_patch_embedding.0.merging.{1,2}                   with SPT: LayerNorm and linear layer
{patch,cls}_transformer.layers.{i}.0.fn.fn.scale     with LSA: the temperature of each head

vit-pytorch's CaiT has the same names of tensors as the plain model, and computes something else in the class blocks.
"""

from __future__ import annotations

from dataclasses import replace

from gmmvit_deploy.models.families.cait.spec import PRESETS, CaiTSpec
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.models.sources.released import mask_names, released_source
from gmmvit_deploy.models.sources.shapes import (
    Shapes,
    infer_heads,
    infer_mask,
)
from gmmvit_deploy.models.sources.source import tensors_of_layers
from gmmvit_deploy.models.sources.spt_lsa import (
    has_shifted,
    shifted_names,
    shifted_patch,
    spt_lsa_source,
    temperature_heads,
)

_PATCH, _CLASS = "patch_transformer.layers", "cls_transformer.layers"
_LINEAR, _SHIFTED = "to_patch_embedding.1", "to_patch_embedding.0.merging"
_TEMPERATURE = r"(patch|cls)_transformer\.layers\.\d+\.0\.fn\.fn\.scale$"


def released_names(spec: CaiTSpec) -> dict[str, str]:
    pairs = {"head_norm": "mlp_head.0", "head": "mlp_head.1"}
    names = {"position_embedding": "pos_embedding", "class_token": "cls_token"}
    if spec.spt:
        names |= shifted_names("patch_embedding", _SHIFTED)
    else:
        pairs["patch_embedding.project"] = _LINEAR
    stacks = [(f"patch_blocks.{i}", f"{_PATCH}.{i}") for i in range(spec.depth)]
    stacks += [(f"class_blocks.{i}", f"{_CLASS}.{i}") for i in range(spec.class_depth)]
    for ours, theirs in stacks:
        pairs |= {
            f"{ours}.attention.norm": f"{theirs}.0.fn.norm",
            f"{ours}.attention.inner.out": f"{theirs}.0.fn.fn.to_out.0",
            f"{ours}.mlp.norm": f"{theirs}.1.fn.norm",
            f"{ours}.mlp.inner.0": f"{theirs}.1.fn.fn.net.0",
            f"{ours}.mlp.inner.2": f"{theirs}.1.fn.fn.net.3",
        }
        names |= {
            f"{ours}.attention.gamma": f"{theirs}.0.scale",
            f"{ours}.mlp.gamma": f"{theirs}.1.scale",
            f"{ours}.attention.inner.query.weight": f"{theirs}.0.fn.fn.to_q.weight",
            f"{ours}.attention.inner.key_value.weight": f"{theirs}.0.fn.fn.to_kv.weight",
            f"{ours}.attention.inner.scores.before.mixing.weight": f"{theirs}.0.fn.fn.mix_heads_pre_attn",
            f"{ours}.attention.inner.scores.after.mixing.weight": f"{theirs}.0.fn.fn.mix_heads_post_attn",
        }
        if spec.lsa:
            names[f"{ours}.attention.inner.scores.before.temperature.temperature"] = f"{theirs}.0.fn.fn.scale"
        if ours.startswith("patch"):
            names |= mask_names(spec.mask, f"{ours}.attention.inner.scores.before.mask", f"{theirs}.0.fn.fn.mask")
    return names | tensors_of_layers(pairs)


def known_unused(spec: CaiTSpec) -> dict[str, str]:
    return {"mask": "a second copy of the base mask, at the root of the file"}


def mixed_heads(shapes: Shapes, first: str) -> tuple[int, str]:
    """Return the number of heads in the head mixing of an attention, and the evidence for `infer_heads`."""
    evidence = "the number of heads in the head mixing matrices of the file is"
    return shapes.of(f"{first}.mix_heads_pre_attn", rank=2)[0], evidence


def infer_spec(shapes: Shapes, hints: LoadHints) -> CaiTSpec:
    """Infer the spec from names and shapes.  The number of heads follows from the head mixing matrices."""
    first = f"{_PATCH}.0.0.fn.fn"
    spt = has_shifted(shapes, _SHIFTED)
    if spt:
        dim, patch_size, channels = shifted_patch(shapes, _SHIFTED)
    else:
        patch_size, channels = shapes.linear_patch(f"{_LINEAR}.weight")
        dim = shapes.of(f"{_LINEAR}.weight", rank=2)[0]
    grid = shapes.grid(shapes.of("pos_embedding", rank=3)[1], where="pos_embedding")
    mask, _ = infer_mask(shapes, hints, f"{first}.mask")
    inner_dim = shapes.of(f"{first}.to_q.weight", rank=2)[0]
    classes = shapes.of("mlp_head.1.weight", rank=2)[0]
    heads = infer_heads(shapes, hints, width=inner_dim, shown=mixed_heads(shapes, first), presets=PRESETS)
    return CaiTSpec(
        image_size=grid * patch_size,
        patch_size=patch_size,
        classes=classes,
        dim=dim,
        depth=shapes.count(r"patch_transformer\.layers\.(\d+)\."),
        class_depth=shapes.count(r"cls_transformer\.layers\.(\d+)\."),
        heads=heads,
        head_dim=inner_dim // heads,
        mlp_dim=shapes.of(f"{_PATCH}.0.1.fn.fn.net.0.weight", rank=2)[0],
        mask=replace(mask, shared=mask.shared and heads > 1),  # a single head cannot share a mask
        channels=channels,
        spt=spt,
        lsa=temperature_heads(shapes, [f"{first}.scale"], pattern=_TEMPERATURE) is not None,
    )


RELEASED = released_source(
    signature=(r"patch_transformer\.layers",),
    spec=infer_spec,
    names=released_names,
    known_unused=known_unused,
)
SPT_LSA = spt_lsa_source(
    signature=(r"patch_transformer\.layers",),
    either=(r"to_patch_embedding\.0\.merging\.", _TEMPERATURE),
    spec=infer_spec,
    names=released_names,
)
