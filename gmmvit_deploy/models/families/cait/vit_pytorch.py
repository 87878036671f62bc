"""Checkpoints of vit-pytorch's CaiT, and of plain CaiTs of SPT_LSA: the tensor names, and how to infer the spec.

In vit-pytorch, the class token of a class block attends to its normed self and to the patches; in the code of SPT_LSA
and in the paper authors' code, to the patches only. No tensor shows the difference.

norm inside   {patch,cls}_transformer.layers.{i}.0   scale, fn.norm, fn.{to_q,to_kv,to_out.0},
                                                     fn.mix_heads_{pre,post}_attn
              {patch,cls}_transformer.layers.{i}.1   scale, fn.net.0 (the norm), fn.net.1, fn.net.4
PreNorm       the names of the paper authors' code (`released`), which SPT_LSA uses as well

The paper authors' code also writes a tensor ``mask`` at the root of the file. A file in the PreNorm style without this
tensor is of SPT_LSA or of vit-pytorch, so the user types ``--set source``. The patch embedding of vit-pytorch's later
releases has norms (to_patch_embedding.1 and .3); SPT_LSA has no such norms.
"""

from __future__ import annotations

from functools import partial

from gmmvit_deploy.models.families.cait.released import infer_spec as infer_released_spec
from gmmvit_deploy.models.families.cait.released import mixed_heads, released_names
from gmmvit_deploy.models.families.cait.spec import CaiTSpec
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.models.sources.patches import image_of_patches
from gmmvit_deploy.models.sources.shapes import Shapes, infer_heads
from gmmvit_deploy.models.sources.source import CheckpointSource, tensors_of_layers
from gmmvit_deploy.models.specs import MaskSpec

_PATCH = "patch_transformer.layers"


def infer_spec(shapes: Shapes, hints: LoadHints, *, norm_inside: bool) -> CaiTSpec:
    """Infer the spec from names and shapes.  The number of heads follows from the head mixing matrices.

    norm_inside: True if the attention and the mlp contain their norms.
    """
    normed = _normed_patches(shapes)
    linear = f"to_patch_embedding.{2 if normed else 1}"
    dim, values = shapes.of(f"{linear}.weight", rank=2)
    grid = shapes.grid(shapes.of("pos_embedding", rank=3)[1], where="pos_embedding")
    image_size, channels, patch_size = image_of_patches(shapes.source, hints, name=linear, values=values, grid=grid)
    first = f"{_PATCH}.0.0.{'fn' if norm_inside else 'fn.fn'}"
    inner_dim = shapes.of(f"{first}.to_q.weight", rank=2)[0]
    heads = infer_heads(shapes, hints, width=inner_dim, shown=mixed_heads(shapes, first))
    hidden = f"{_PATCH}.0.1.{'fn.net.1' if norm_inside else 'fn.fn.net.0'}.weight"
    return CaiTSpec(
        image_size=image_size,
        channels=channels,
        patch_size=patch_size,
        classes=shapes.of("mlp_head.1.weight", rank=2)[0],
        dim=dim,
        depth=shapes.count(r"patch_transformer\.layers\.(\d+)\."),
        class_depth=shapes.count(r"cls_transformer\.layers\.(\d+)\."),
        heads=heads,
        head_dim=inner_dim // heads,
        mlp_dim=shapes.of(hidden, rank=2)[0],
        normed_patches=normed,
        attends_to_itself=True,
        mask=MaskSpec(),
    )


def _normed_patches(shapes: Shapes) -> bool:
    return any(f"to_patch_embedding.{index}.weight" in shapes for index in (2, 3))


def tensor_names(spec: CaiTSpec, *, norm_inside: bool) -> dict[str, str]:
    """Return a dict from name in the model to name in the file, for every tensor of the trained model.

    norm_inside: True if the attention and the mlp contain their norms.
    """
    names = released_names(spec)
    if norm_inside:
        names = {ours: _inside(theirs) for ours, theirs in names.items()}
    if spec.normed_patches:
        layers = ("patch_norm", "project", "token_norm")
        names |= tensors_of_layers(
            {f"patch_embedding.{layer}": f"to_patch_embedding.{index}" for index, layer in enumerate(layers, start=1)}
        )
    return names


def _inside(prenorm: str) -> str:
    """Return the name of a tensor in the norm-inside style: the norm of an mlp is the first layer of its ``net``."""
    mlp = {".1.fn.norm.": ".1.fn.net.0.", ".1.fn.fn.net.0.": ".1.fn.net.1.", ".1.fn.fn.net.3.": ".1.fn.net.4."}
    for theirs, inside in mlp.items():
        if theirs in prenorm:
            return prenorm.replace(theirs, inside)
    return prenorm.replace(".fn.fn.", ".fn.")


_ROOT_MASK = r"mask$"
_LSA, _SPT = rf"{_PATCH}\.\d+\.0\.fn\.fn\.scale$", r"to_patch_embedding\.0\."
_ATTENTION_MASK = rf"{_PATCH}\.\d+\.0\.fn\.fn\.mask\."
_NORMS = r"to_patch_embedding\.[23]\."
_PRENORM_NAMES = (r"patch_transformer\.layers", rf"{_PATCH}\.0\.0\.fn\.fn\.")

VIT_PYTORCH = CheckpointSource(
    name="vit-pytorch's CaiT",
    signature=(r"patch_transformer\.layers", rf"{_PATCH}\.0\.0\.fn\.to_q\."),
    spec=partial(infer_spec, norm_inside=True),
    tensors=partial(tensor_names, norm_inside=True),
    option="vit-pytorch",
)
PRENORM = CheckpointSource(
    name="vit-pytorch's CaiT in the PreNorm style",
    signature=_PRENORM_NAMES,
    absent=(_ROOT_MASK, _ATTENTION_MASK, _LSA, _SPT),
    spec=partial(infer_spec, norm_inside=False),
    tensors=partial(tensor_names, norm_inside=False),
    option="vit-pytorch",
)
SPT_LSA_PLAIN = CheckpointSource(
    name="the CaiT of SPT_LSA",
    signature=_PRENORM_NAMES,
    absent=(_ROOT_MASK, _ATTENTION_MASK, _LSA, _SPT, _NORMS),
    spec=infer_released_spec,
    tensors=released_names,
    option="spt-lsa",
)
