"""The five models of the paper as its released code names them, with a mask and without, and as that code computes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache

import numpy as np
import onnx
import torch
from torch import nn

from gmmvit_deploy.export.onnx_from_model import onnx_from_model
from gmmvit_deploy.export.variants import graph_from_model
from gmmvit_deploy.folding.fold import fold
from gmmvit_deploy.models.attention import MaskedAttention, heads_of
from gmmvit_deploy.models.build import Model, model_from_spec
from gmmvit_deploy.presets import preset_spec
from gmmvit_deploy.runners.runner import Device
from gmmvit_deploy.specs import MaskSpec, ViTSpec

__all__ = ["FAMILIES", "EinsumAttention", "as_released", "eager", "graphs_of", "pair"]

FAMILIES = ("vit", "swin", "cait", "pit", "t2t")
_CALIBRATION_BATCHES = 4


def pair(family: str) -> dict[str, Model]:
    """A GMM model with random weights, and the same without its masks."""
    torch.manual_seed(0)
    spec = preset_spec(family, classes=10, image_size=32, mask=MaskSpec(kind="gmm", kernels=5))
    plain = replace(spec, mask=MaskSpec())
    if isinstance(plain, ViTSpec):
        plain = replace(plain, class_token=False)
    masked, twin = model_from_spec(spec).eval(), model_from_spec(plain).eval()
    twin.load_state_dict({name: t for name, t in masked.state_dict().items() if ".mask." not in name})
    return {"gmm": masked, "plain": twin}


class EinsumAttention(nn.Module):
    """The products of `MaskedAttention` written as Einsum; everything else is the original's."""

    def __init__(self, original: MaskedAttention) -> None:
        super().__init__()
        self.original = original

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attention = self.original
        query, key, value = (heads_of(part, attention.heads) for part in attention.qkv(x).chunk(3, dim=-1))
        scores = attention.scores.masked(torch.einsum("bhid,bhjd->bhij", query, key))
        weights = attention.scores.normalised(scores)
        mixed = torch.einsum("bhij,bhjd->bhid", weights, value)
        return attention.out(mixed.transpose(1, 2).flatten(2))


def as_released(model: Model) -> Model:
    """A copy whose attention products are Einsums, as in the released code."""
    copied = copy.deepcopy(model)
    for parent in list(copied.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, MaskedAttention) and not isinstance(parent, EinsumAttention):
                setattr(parent, name, _einsum(child))
    return copied


def _einsum(attention: MaskedAttention) -> nn.Module:
    """Swin has windows as one more dimension, and scales Q: it stays as our module has it."""
    return attention if attention.scores.scales_query else EinsumAttention(attention)


def eager(model: nn.Module, device: Device = "cpu") -> Callable[[np.ndarray], np.ndarray]:
    """On a GPU in float32 without TF32, and with the copies to it and back."""
    place = "cuda" if device == "gpu" else "cpu"
    model = model.to(place)

    def run(images: np.ndarray) -> np.ndarray:
        with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            return model(torch.from_numpy(images).to(place)).cpu().numpy()

    return run


def graphs_of(family: str, wanted: Iterable[str], *, max_batch: int) -> dict[str, onnx.ModelProto]:
    """Of the models of `pair`, to be read only: straight, the module unfolded; gmm and plain, our exports, and
    gmm_fp16 and plain_fp16; int8, gmm's Q/DQ graph.
    """
    return {name: _graph(family, name, max_batch) for name in wanted}


@lru_cache(maxsize=8)
def _graph(family: str, name: str, max_batch: int) -> onnx.ModelProto:
    models = pair(family)
    generator = np.random.default_rng(7)
    images = [generator.standard_normal((8, 3, 32, 32), dtype=np.float32) for _ in range(_CALIBRATION_BATCHES)]
    options = {"preprocessing": None, "max_batch": max_batch}
    make = {
        "straight": lambda: onnx_from_model(as_released(models["gmm"]), **options),
        "gmm": lambda: onnx_from_model(fold(models["gmm"]).model, **options),
        "plain": lambda: onnx_from_model(fold(models["plain"]).model, **options),
        "gmm_fp16": lambda: graph_from_model(models["gmm"], "fp16", **options).proto,
        "plain_fp16": lambda: graph_from_model(models["plain"], "fp16", **options).proto,
        "int8": lambda: graph_from_model(models["gmm"], "int8", **options, calibration=images).proto,
    }
    return make[name]()
