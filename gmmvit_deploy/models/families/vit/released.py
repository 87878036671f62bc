"""ViT checkpoints of the released codes (`sources.released`): the names of the tensors, and how to infer the spec.

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

from dataclasses import replace

from gmmvit_deploy.errors import CheckpointError
from gmmvit_deploy.models.families.vit.spec import PRESETS, ViTSpec
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.models.sources.released import (
    OPTION,
    PLAIN_FILES,
    VIEWS,
    block_names,
    has_shifted,
    released_source,
    shifted_names,
    spt_lsa_source,
    temperature_heads,
)
from gmmvit_deploy.models.sources.shapes import Shapes, asked_pool, infer_heads, infer_mask, known_pool
from gmmvit_deploy.models.sources.source import tensors_of_layers

_LAYERS = "transformer.layers"
_FIRST = f"{_LAYERS}.0.0.fn"
_TEMPERATURE = r"transformer\.layers\.\d+\.0\.fn\.scale$"
_LINEAR, _SHIFTED = "to_patch_embedding.1", "to_patch_embedding.merging"
_ROOT_MASK = "mask"


def released_names(spec: ViTSpec) -> dict[str, str]:
    layers = {"head_norm": "mlp_head.0", "head": "mlp_head.1"}
    names = {"position_embedding": "pos_embedding"}
    if spec.spt:
        names |= shifted_names("patch_embedding", _SHIFTED)
    else:
        layers["patch_embedding.project"] = _LINEAR
    if spec.class_token:
        names |= {"class_token": "cls_token"}
    projects = not (spec.heads == 1 and spec.head_dim == spec.dim)
    for i in range(spec.depth):
        names |= block_names(f"blocks.{i}", f"{_LAYERS}.{i}", mask=spec.mask, projects=projects)
        if spec.lsa:
            names[f"blocks.{i}.attention.scores.before.temperature.temperature"] = f"{_LAYERS}.{i}.0.fn.scale"
    return names | tensors_of_layers(layers)


def shown_heads(shapes: Shapes, hints: LoadHints) -> tuple[int | None, str]:
    """Return the number of heads that the tensors show, or None, and the evidence for `infer_heads`."""
    if temperatures := temperature_heads(shapes, [f"{_FIRST}.scale"], pattern=_TEMPERATURE):
        return temperatures[0], "the number of temperatures in the file is"
    _, mask_heads = infer_mask(shapes, hints, f"{_FIRST}.mask")
    if mask_heads:
        return mask_heads, "the number of heads in the masks of the file is"
    width, dim = shapes.of(f"{_FIRST}.to_qkv.weight", rank=2)
    single = f"{_FIRST}.to_out.0.weight" not in shapes and width // 3 == dim
    return 1 if single else None, "the file has no output projection, so the number of heads is"


def infer_spec(shapes: Shapes, hints: LoadHints) -> ViTSpec:
    source = shapes.source
    spt = has_shifted(shapes, _SHIFTED)
    embedding, views = (f"{_SHIFTED}.2", VIEWS) if spt else (_LINEAR, 1)
    dim, patch_size, channels = shapes.linear_patch(f"{embedding}.weight", views=views)
    temperatures = temperature_heads(shapes, [f"{_FIRST}.scale"], pattern=_TEMPERATURE)
    class_token = "cls_token" in shapes
    positions = shapes.of("pos_embedding", rank=3)[1] - int(class_token)
    grid = shapes.grid(positions, where="pos_embedding without the class token" if class_token else "pos_embedding")
    mask, _ = infer_mask(shapes, hints, f"{_FIRST}.mask")
    if class_token and mask.kind != "plain":
        raise CheckpointError(
            f"{source}: the file has a class token and a {mask.kind} mask; expected no class token, "
            "because the masked ViTs of the released code have no class token"
        )
    pools_all = _pools_all(shapes, hints, class_token=class_token, spt_lsa=spt or temperatures is not None)
    inner_dim = shapes.of(f"{_FIRST}.to_qkv.weight", rank=2)[0] // 3
    classes = shapes.of("mlp_head.1.weight", rank=2)[0]
    heads = infer_heads(shapes, hints, width=inner_dim, shown=shown_heads(shapes, hints), presets=PRESETS)
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
        mask=replace(mask, shared=mask.shared and heads > 1),  # a single head cannot share a mask
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
    signature=(r"to_patch_embedding\.1\.weight$", r"transformer\.layers\."),
    spec=infer_spec,
    names=released_names,
    shown_heads=shown_heads,
    own_hints=("pool",),
    same_names=PLAIN_FILES | {"vit-pytorch": PLAIN_FILES[OPTION]},
)
SPT_LSA = spt_lsa_source(
    signature=(r"to_patch_embedding\.(1\.weight$|merging\.)", r"transformer\.layers\."),
    either=(r"to_patch_embedding\.merging\.", _TEMPERATURE),
    spec=infer_spec,
    names=released_names,
    shown_heads=shown_heads,
    own_hints=("pool",),
)
