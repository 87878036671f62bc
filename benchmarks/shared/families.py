"""Make the measured models: as trained, as plain twins, and as the paper authors' code writes attention.

The names of the paper's five models are those of the paper authors' code, the "released code" below. `systems` has the
other models.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir
import torch
from torch import nn

from benchmarks.shared.straight_export import straight_graph
from benchmarks.shared.systems import SYSTEMS, system_pair
from gmmvit_deploy.exporting.graphs_of_precisions import graph_from_model
from gmmvit_deploy.exporting.onnx_from_model import onnx_from_model
from gmmvit_deploy.inference.precision import Precision, Role
from gmmvit_deploy.models.families import model_from_spec, preset_spec
from gmmvit_deploy.models.families.cait.model import TalkingHeadsAttention
from gmmvit_deploy.models.folding.fold import fold
from gmmvit_deploy.models.layers.attention import MaskedAttention, heads_of
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.specs import MaskSpec, input_shape
from gmmvit_deploy.runtimes.runners.runner import Device

_CALIBRATION_BATCHES = 4


def pair(family: str) -> dict[str, Model]:
    """Return ``trained`` → a model with random weights, and ``plain`` → the model with the same weights and no mask."""
    if family in SYSTEMS:
        return system_pair(family)
    torch.manual_seed(0)
    spec = preset_spec(family, classes=10, image_size=32, mask=MaskSpec(kind="gmm", kernels=5))
    plain = replace(spec, mask=MaskSpec())
    if hasattr(plain, "class_token"):
        plain = replace(plain, class_token=False)  # masked models have no class token
    masked, twin = model_from_spec(spec).eval(), model_from_spec(plain).eval()
    twin.load_state_dict({name: t for name, t in masked.state_dict().items() if ".mask." not in name})
    return {"trained": masked, "plain": twin}


class EinsumAttention(nn.Module):
    """`MaskedAttention` with both matrix products written as Einsum.  All other parts are those of the original."""

    operator_roles: ClassVar[Mapping[str, Role]] = {"einsum": "product", "softmax": "softmax"}

    def __init__(self, original: MaskedAttention) -> None:
        super().__init__()
        self.heads = original.heads
        self.qkv, self.scores, self.out = original.qkv, original.scores, original.out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (heads_of(part, self.heads) for part in self.qkv(x).chunk(3, dim=-1))
        weights = self.scores.normalised(self.scores.masked(_scores(query, key)))
        return self.out(_mixed(weights, value).transpose(1, 2).flatten(2))


class EinsumTalkingHeads(nn.Module):
    """`TalkingHeadsAttention` with both matrix products and both head mixings written as Einsum."""

    operator_roles: ClassVar[Mapping[str, Role]] = {"einsum": "product", "softmax": "softmax"}

    def __init__(self, original: TalkingHeadsAttention) -> None:
        super().__init__()
        self.heads = original.heads
        self.query, self.key_value = original.query, original.key_value
        self.scores, self.out = original.scores, original.out

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        query = heads_of(self.query(x), self.heads)
        key, value = (heads_of(part, self.heads) for part in self.key_value(context).chunk(2, dim=-1))
        *masked, (_, mix_before) = self.scores.steps_before()
        ((_, mix_after),) = self.scores.steps_after()
        scores = _scores(query, key)
        for _, step in masked:
            scores = step(scores)
        weights = torch.softmax(_mixed_heads(scores, mix_before.matrix()), dim=-1)
        weights = _mixed_heads(weights, mix_after.matrix())
        return self.out(_mixed(weights, value).transpose(1, 2).flatten(2))


def _scores(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bhid,bhjd->bhij", query, key)


def _mixed(weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bhij,bhjd->bhid", weights, value)


def _mixed_heads(scores: torch.Tensor, mixing: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bhij,hg->bgij", scores, mixing)


_AS_EINSUM: dict[str, dict[type[nn.Module], Callable[[Any], nn.Module]]] = {
    "vit": {MaskedAttention: EinsumAttention},
    "pit": {MaskedAttention: EinsumAttention},
    "cait": {TalkingHeadsAttention: EinsumTalkingHeads},
}
"""Family → class of our module → function that makes the same module with Einsum, as the released code writes it."""


def as_released(model: Model) -> Model:
    """Copy a trained model, with the matrix products of attention written as in the released code.

    vit, pit     Q Kᵀ and P V are Einsums over (batch, head, token, head dim)
    cait         as in vit, and both head mixings are Einsums over the heads; our module uses a matrix product
    swin, t2t    both products are ``@``, as in our modules, so the copy is equal to the model
    others       the copy is equal to the model, whose operators were not compared with those of the authors' code

    Both forms produce the logits of the released code bit for bit; only the time differs. With SPT and LSA, the form is
    that of the same family without SPT and LSA.
    """
    copied = copy.deepcopy(model)
    forms = _AS_EINSUM.get(copied.spec.family, {})
    for parent in list(copied.modules()):
        for name, child in list(parent.named_children()):
            if type(child) in forms:
                setattr(parent, name, forms[type(child)](child))
    return copied


def eager(
    model: nn.Module, device: Device = "cpu", precision: Precision = "fp32"
) -> Callable[[np.ndarray], np.ndarray]:
    """Return a program that runs the model in eager PyTorch, on a GPU without TF32; bf16 and fp16 are autocast's."""
    place = "cuda" if device == "gpu" else "cpu"
    model = model.to(place)
    narrow = torch.float16 if precision == "fp16" else torch.bfloat16

    def run(images: np.ndarray) -> np.ndarray:
        with (
            torch.inference_mode(),
            torch.backends.cudnn.flags(enabled=True, allow_tf32=False),
            torch.autocast(place, dtype=narrow, enabled=precision != "fp32"),
        ):
            return model(torch.from_numpy(images).to(place)).float().cpu().numpy()

    return run


def compiled(
    model: nn.Module, image_shape: tuple[int, ...], device: Device = "cpu", precision: Precision = "fp32"
) -> Callable[[np.ndarray], np.ndarray]:
    """Return a program that runs the model with torch.compile, on the CPU compiled for each batch size.

    It computes one image at once, so that an error of the compiler is raised here.
    """
    run = eager(torch.compile(model, dynamic=device == "gpu"), device, precision)
    run(np.zeros((1, *image_shape), np.float32))
    return run


def graphs_of(family: str, names: Iterable[str], *, max_batch: int) -> dict[str, ir.Model]:
    """Return graphs of the models of `pair`, which callers share and must not change.

    names: straight (exported without folding), trained and plain, each also with _fp16 or _bf16; int8 and fp8 (for
    GPUs), int8_cpu.
    """
    return {name: _graph(family, name, max_batch) for name in names}


@lru_cache(maxsize=8)
def _graph(family: str, name: str, max_batch: int) -> ir.Model:
    models = pair(family)
    generator = np.random.default_rng(7)
    shape = (8, *input_shape(models["trained"].spec))
    images = [generator.standard_normal(shape, dtype=np.float32) for _ in range(_CALIBRATION_BATCHES)]
    options = {"preprocessing": None, "max_batch": max_batch}
    make = {
        "straight": lambda: straight_graph(as_released(models["trained"]), shape[1:], max_batch),
        "trained": lambda: onnx_from_model(fold(models["trained"]).model, **options),
        "plain": lambda: onnx_from_model(fold(models["plain"]).model, **options),
        "trained_fp16": lambda: graph_from_model(models["trained"], "fp16", **options).model,
        "plain_fp16": lambda: graph_from_model(models["plain"], "fp16", **options).model,
        "trained_bf16": lambda: graph_from_model(models["trained"], "bf16", **options).model,
        "int8": lambda: graph_from_model(models["trained"], "int8", **options, calibration=images).model,
        "int8_cpu": lambda: (
            graph_from_model(models["trained"], "int8", **options, calibration=images, for_cpu=True).model
        ),
        "fp8": lambda: graph_from_model(models["trained"], "fp8", **options, calibration=images).model,
    }
    return make[name]()
