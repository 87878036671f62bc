"""Graphs of small timm models, exported as `onnx_from_model` exports a model, for tests of graphs and kernels.

The fused attention call of timm is answered by a matrix product, a scale, an addition if the call has ``attn_mask``, a
softmax and a matrix product. The nodes declare no roles.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.passes.common import NameFixPass
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gmmvit_deploy.exporting._declared_roles import name_nodes
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


class _Answered(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        return _attention(*args, **kwargs)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False
) -> Tensor:
    assert not is_causal
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    if attn_mask is not None:
        scores = scores + attn_mask
    return scores.softmax(dim=-1) @ v


class _Exported(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        with _Answered():
            logits: Tensor = self.network(images)
        return logits


@functools.cache
def model_of(name: str) -> tuple[nn.Module, tuple[int, int, int]]:
    """Return the test model with weights of a fixed seed, and the shape of an image."""
    import timm

    architecture, arguments = ARCHITECTURES[name]
    torch.manual_seed(0)
    model = timm.create_model(architecture, pretrained=False, num_classes=10, **arguments).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # zeros and ones of a new model would hide a wrong rewrite
            parameter.add_(0.02 * torch.randn_like(parameter))
        for module in model.modules():
            if hasattr(module, "fused_attn"):
                module.fused_attn = True
    size = arguments.get("img_size", 64)
    return model, (3, size, size)


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


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


@functools.cache
def _exported(name: str) -> ir.Model:
    model, shape = model_of(name)
    with _quiet():
        program = torch.onnx.export(
            _Exported(model),
            (torch.zeros(2, *shape),),
            dynamo=True,
            opset_version=20,
            input_names=["tensor"],
            output_names=["logits"],
            dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=64)},),
            verbose=False,
        )
    assert program is not None
    NameFixPass()(program.model)
    name_nodes(program.model)
    return program.model


def exported(name: str) -> ir.Model:
    """Return a copy of the graph of a test model."""
    return _exported(name).clone()
