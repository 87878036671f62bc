"""Small timm models and their graphs, for tests of graphs and kernels."""

from __future__ import annotations

import functools
from typing import Any
from unittest.mock import patch

import onnx_ir as ir
import torch

from gmmvit_deploy.exporting.onnx_from_model import onnx_from_model
from gmmvit_deploy.models.families.timm.model import TimmModel
from gmmvit_deploy.models.families.timm.spec import TimmSpec
from gmmvit_deploy.models.specs import MaskSpec

_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
_DEEP = {"img_size": 56, "patch_size": 4, "embed_dim": 32, "depth": 4, "num_heads": 2}
"""As many patches as a ViT with patches of 16 pixels has at 224."""
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("vit_tiny_patch16_224", {**_VIT, "embed_dim": 48, "num_heads": 3}),
    "registers": ("vit_medium_patch16_reg4_gap_256", {**_VIT, "init_values": 0.1, "qk_norm": True}),
    "rmsnorm": ("vit_tiny_patch16_224", {**_VIT, "norm_layer": "rmsnorm"}),
    "map_pooling": ("vit_base_patch16_siglip_224", dict(_VIT)),
    "196_patches": ("vit_tiny_patch16_224", _DEEP),
    "196_patches_registers": ("vit_medium_patch16_reg4_gap_256", _DEEP),
    "196_patches_map_pooling": ("vit_base_patch16_siglip_224", _DEEP),
    "64_patches": ("vit_tiny_patch16_224", {**_DEEP, "img_size": 32}),
    "clip": ("vit_base_patch32_clip_quickgelu_224", dict(_VIT)),
    "swin": (
        "swin_tiny_patch4_window7_224",
        {"img_size": 32, "patch_size": 4, "window_size": 4, "embed_dim": 32, "depths": (2, 1), "num_heads": (2, 4)},
    ),
    "swin_padded": (
        "swin_tiny_patch4_window7_224",
        {"img_size": 24, "patch_size": 4, "window_size": 4, "embed_dim": 32, "depths": (2,), "num_heads": (2,)},
    ),
    "beit": ("beit_base_patch16_224", dict(_VIT)),
    "relpos": ("vit_relpos_small_patch16_224", dict(_VIT)),
    "pit": (
        "pit_ti_224",
        {"img_size": 32, "patch_size": 8, "stride": 4, "base_dims": (16, 16), "depth": (1, 1), "heads": (1, 2)},
    ),
    "eva02": ("eva02_tiny_patch14_224", {**_VIT, "patch_size": 8}),
    "rope": ("vit_small_patch16_rope_224", dict(_VIT)),
    "cait": ("cait_xxs24_224", {**_VIT, "depth_token_only": 1}),
    "mobilevit": ("mobilevit_xxs", {}),
    "resnet": ("resnet18", {}),
    "convnext": ("convnext_atto", {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32)}),
    "mobilenet": ("mobilenetv3_small_050", {}),
}
"""Name of a test model → (timm's name of the architecture, arguments that make the model small)."""


@functools.cache
def timm_model(name: str) -> TimmModel:
    """Return the test model as a `TimmModel`, whose attentions are answered, with weights of a fixed seed."""
    architecture, arguments = ARCHITECTURES[name]
    torch.manual_seed(0)
    spec = TimmSpec(
        architecture=architecture,
        model_args={**arguments, "num_classes": 10},
        image_size=arguments.get("img_size", 64),
        classes=10,
        mask=MaskSpec(),
    )
    model = TimmModel(spec).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def _nothing(*_: object, **__: object) -> None:
    """Stand for a step of the export that the tests take themselves."""


@functools.cache
def _exported(name: str) -> ir.Model:
    steps = dict.fromkeys(("fold_constants", "declare_roles", "split_stacked_projections"), _nothing)
    with patch.multiple("gmmvit_deploy.exporting.onnx_from_model", **steps):
        return onnx_from_model(timm_model(name), preprocessing=None, max_batch=64)


def exported(name: str) -> ir.Model:
    """Return a copy of the graph of a test model, before constants are folded and stacked projections split, without
    declared roles.
    """
    return _exported(name).clone()
