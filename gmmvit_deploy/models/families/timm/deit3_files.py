"""Checkpoints of DeiT III (facebookresearch/deit, models_v2.py): the names of the tensors that differ from timm's.

blocks.{i}.gamma_1, gamma_2      ls1.gamma, ls2.gamma (LayerScale)

The files do not hold timm's name of the architecture, so the user types this name, such as ``deit3_small_patch16_224``.
"""

from __future__ import annotations

import re

from gmmvit_deploy.models.families.timm import checkpoint
from gmmvit_deploy.models.families.timm.spec import TimmSpec
from gmmvit_deploy.models.sources.source import CheckpointSource, TensorOrigins


def tensor_origins(spec: TimmSpec) -> TensorOrigins:
    """Return a dict from name in the model to name in the file."""
    return {
        name: re.sub(r"\.ls([12])\.gamma$", r".gamma_\1", str(key))
        for name, key in checkpoint.tensor_origins(spec).items()
    }


DEIT3_FILES = CheckpointSource(
    name="DeiT III",
    signature=(r"blocks\.0\.gamma_1$", r"blocks\.0\.attn\.qkv\.weight$", r"cls_token$"),
    absent=(r"blocks\.0\.attn\.proj_l\.",),  # CaiT, which stores LayerScale under the same names
    spec=checkpoint.infer_spec,
    tensors=tensor_origins,
    known_unused=checkpoint.known_unused,
    images=checkpoint.known_images,
    taken_from=checkpoint.taken_from,
    interpolation=lambda shapes, hints: "deit",
    own_hints=("model_args",),
)
