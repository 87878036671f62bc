"""The spec of a small model of each family: two blocks, two heads, dims up to 32, and images up to 32×32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gmmvit_deploy.models.families import Family
from gmmvit_deploy.models.families.cait import CaiTSpec
from gmmvit_deploy.models.families.deepvit import DeepViTSpec
from gmmvit_deploy.models.families.eanet import EANetSpec
from gmmvit_deploy.models.families.hugging_face.spec import HuggingFaceSpec
from gmmvit_deploy.models.families.naive_vit import NaiveViTSpec
from gmmvit_deploy.models.families.pit import PiTSpec
from gmmvit_deploy.models.families.rmt import RMTSpec
from gmmvit_deploy.models.families.swin import SwinSpec
from gmmvit_deploy.models.families.t2t import T2TSpec
from gmmvit_deploy.models.families.timm.spec import TimmSpec
from gmmvit_deploy.models.families.vit import ViTSpec
from gmmvit_deploy.models.families.vit_pytorch import VitPytorchSpec
from gmmvit_deploy.models.specs import MaskKind, MaskSpec, ModelSpec

_PLAIN = MaskSpec()
_SIZES: dict[str, Any] = {"classes": 5, "dim": 32, "depth": 2, "heads": 2, "mlp_dim": 48, "mask": _PLAIN}
_PATCHES: dict[str, Any] = {**_SIZES, "image_size": 16, "patch_size": 4}
# fmt: off
_STAGES: dict[str, Any] = {
    "image_size": 16, "classes": 5, "dim": 32, "heads": (2, 4), "mlp_dims": (48, 64), "mask": _PLAIN,
}
_OF_TIMM = {
    "img_size": [16, 16], "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, "mlp_ratio": 2,
    "num_classes": 5,
}
_OF_TRANSFORMERS = {
    "image_size": 16, "patch_size": 4, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_labels": 5,
}
SMALL: Mapping[str, ModelSpec] = {
    "vit": ViTSpec(**_PATCHES, head_dim=16, class_token=True),
    "swin": SwinSpec(**_STAGES, patch_size=2, depths=(2, 1), window=4),
    "cait": CaiTSpec(**_PATCHES, class_depth=1, head_dim=16),
    "pit": PiTSpec(**_STAGES, patch_size=4, depths=(2, 1), head_dim=16),
    "t2t": T2TSpec(**_SIZES, image_size=16, head_dim=16, token_layers=1, token_dim=16, token_mlp_dim=16),
    "naive_vit": NaiveViTSpec(
        image_size=12, channels=1, patch_size=4, classes=5, dim=32, depth=2, heads=2, mlp_dim=32, mask=_PLAIN,
    ),
    "deepvit": DeepViTSpec(
        **_PATCHES, reattention=(False, True), stem_channels=8, qkv_bias=True, scale_adjustment=0.5,
        transform_scale=True,
    ),
    "rmt": RMTSpec(
        image_size=24, classes=5, dims=(32, 32), depths=(1, 1), heads=(2, 2), mlp_dims=(48, 64),
        decomposed_stages=(1,), layer_scale=(2,), release="2024", projection_dim=40, mask=MaskSpec(kind="decay"),
    ),
    "eanet": EANetSpec(
        image_size=32, classes=5, dim=24, depth=2, heads=2, mlp_dim=32, token_dim=16, expansion=4, slots=16,
        token_slots=24, mask=_PLAIN,
    ),
    "vit_pytorch": VitPytorchSpec(
        **_PATCHES, head_dim=16, attention="reattention", embedding="normed", output="bias", class_token=True,
        stored_positions=True, pool="mean", final_norm=False, head_norm=True,
    ),
    "timm": TimmSpec(architecture="vit_tiny_patch16_224", model_args=_OF_TIMM, image_size=16, classes=5, mask=_PLAIN),
    "hugging_face": HuggingFaceSpec(
        architecture="ViTForImageClassification", config=_OF_TRANSFORMERS, image_size=16, classes=5, mask=_PLAIN,
    ),
}
# fmt: on
"""Family → the spec with its first kind of mask."""


def small_spec(family: str, kind: MaskKind = "plain") -> Any:
    """Return the spec with a kind of mask.  A Gaussian mixture mask has three Gaussians per head."""
    spec: Any = SMALL[family]
    if family == "vit":
        spec = replace(spec, class_token=kind == "plain")
    return replace(spec, mask=MaskSpec(kind=kind, kernels=3 if kind == "gmm" else 0))


def small_specs(family: Family) -> dict[MaskKind, Any]:
    return {kind: small_spec(family.name, kind) for kind in family.mask_kinds}


def variants(family: Family) -> dict[str, Any]:
    """Return name → the spec of each variant of a family that is no kind of mask."""
    if not family.has_spt_and_lsa:
        return {}
    spec = small_spec(family.name)
    if family.name == "swin":
        spec = replace(spec, depths=(2, 2))
    if family.name == "t2t":
        spec = replace(spec, class_token=True)
        return {"spt-lsa": replace(spec, spt=True, lsa=True), "class-token": spec}
    return {"spt-lsa": replace(spec, spt=True, lsa=True)}
