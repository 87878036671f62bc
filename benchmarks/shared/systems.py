"""Name the models that the scripts measure: the paper's five families, and the systems with another attention.

A system is an architecture at a fixed size, with random weights and statistics:

    deepvit               DeepViT (Re-attention)
    rmt                   RMT, the release of 2024 (Manhattan decay)
    eanet                 EANet (external attention)
    vit_pytorch_deepvit   vit-pytorch's DeepViT (Re-attention with a norm over the heads)
    vit_pytorch_small     vit-pytorch's small-data ViT (SPT and LSA)
    …_spt_lsa             the paper's families with shifted patch tokenisation (SPT) and locality self-attention (LSA)

The plain twin of a system has the same weights without the constants on the scores; the ratio of both times is their
cost.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks.shared.places import FAMILIES
from gmmvit_deploy.models import families
from gmmvit_deploy.models.families import PRESETS, model_from_spec, preset_spec
from gmmvit_deploy.models.families.vit_pytorch import AttentionKind, EmbeddingKind, VitPytorchSpec
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.scores.attention import attention_scores
from gmmvit_deploy.models.specs import MaskSpec, ModelSpec

LSA_FAMILIES = tuple(family.name for family in families.FAMILIES if family.has_spt_and_lsa)
"""The families that have variants with SPT and LSA."""


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """An architecture at the size of a preset.

    shortened: field → smaller value, where a run would take longer than some minutes.
    plain: makes the plain twin of a model; None if there is none.
    """

    spec: ModelSpec
    preset: str
    shortened: Mapping[str, Any] = field(default_factory=dict)
    plain: Callable[[Model], Model] | None = None

    @property
    def timed_spec(self) -> ModelSpec:
        """The spec for the scripts that measure times."""
        return replace(self.spec, **self.shortened)

    @property
    def full_size(self) -> str:
        """The size of `spec` in words, for example ``preset RMT_T3, 224×224``."""
        return f"preset {self.preset}, {_side_words(self.spec)}"

    @property
    def size(self) -> str:
        """The size of `timed_spec` in words, for example ``preset P, 224×224, depths (1, 1) in place of (2, 8)``."""
        words = [f"preset {self.preset}", _side_words(self.timed_spec)]
        if "image_size" in self.shortened:
            words[-1] += f" in place of {_side_words(self.spec)}"
        words += [
            f"{name} {value} in place of {getattr(self.spec, name)}"
            for name, value in self.shortened.items()
            if name in ("depth", "depths")
        ]
        return ", ".join(words)


def _side_words(spec: ModelSpec) -> str:
    height, width = spec.image_shape
    return f"{height}×{width}"


def _preset(name: str, *, image_size: int = 224, classes: int = 1000, lsa: bool = False) -> ModelSpec:
    return preset_spec(name, classes=classes, image_size=image_size, mask=MaskSpec(), spt=lsa, lsa=lsa)


def _vit_pytorch(attention: AttentionKind, embedding: EmbeddingKind) -> VitPytorchSpec:
    """Return a network of vit-pytorch with the sizes of the preset ``vit``, because vit-pytorch has no presets."""
    return VitPytorchSpec(
        image_size=32,
        patch_size=4,
        classes=10,
        dim=192,
        depth=9,
        heads=12,
        head_dim=16,
        mlp_dim=384,
        attention=attention,
        embedding=embedding,
        output="bias",
        class_token=True,
        stored_positions=True,
        pool="cls",
        final_norm=False,
        head_norm=True,
        mask=MaskSpec(),
    )


def _without_lsa(model: Model) -> Model:
    changes: dict[str, Any] = {"attention": "plain"} if isinstance(model.spec, VitPytorchSpec) else {"lsa": False}
    twin = model_from_spec(replace(model.spec, **changes)).eval()
    trained = model.state_dict()
    twin.load_state_dict({name: trained[name] for name in twin.state_dict()})
    return twin


def _without_decay(model: Model) -> Model:
    twin = copy.deepcopy(model)
    for _, scores in attention_scores(twin):
        scores.put("before.decay", None)
    return twin


_SHORTENED: Mapping[str, Mapping[str, Any]] = {
    "swin": {"depths": (2, 2, 2)},
    "cait": {"depth": 6},
    "pit": {"depths": (1, 2, 2)},
    "t2t": {"depth": 4},
}
"""Family → `System.shortened` of the family with SPT and LSA."""

SYSTEMS: Mapping[str, System] = {
    "deepvit": System(
        spec=_preset("deepvit_patch16_224_re_attn_16b"),
        preset="deepvit_patch16_224_re_attn_16b",
        shortened={"image_size": 112, "depth": 4, "reattention": (True,) * 4},
    ),
    "rmt": System(
        spec=_preset("RMT_T3"),
        preset="RMT_T3",
        shortened={"image_size": 112, "depths": (1, 1, 2, 1)},
        plain=_without_decay,
    ),
    "eanet": System(spec=_preset("T2t_vit_7"), preset="T2t_vit_7", shortened={"image_size": 112}),
    "vit_pytorch_deepvit": System(spec=_vit_pytorch("reattention", "normed"), preset="vit"),
    "vit_pytorch_small": System(spec=_vit_pytorch("lsa", "shifted"), preset="vit", plain=_without_lsa),
    **{
        f"{family}_spt_lsa": System(
            spec=_preset(family, image_size=32, classes=10, lsa=True),
            preset=family,
            shortened=_SHORTENED.get(family, {}),
            plain=_without_lsa,
        )
        for family in LSA_FAMILIES
        if family in PRESETS
    },
}
"""Name → system, in the order of the tables.  For ``vit_pytorch_…``, the preset gives only the sizes."""

MEASURED = (*FAMILIES, *SYSTEMS)
"""The names of all models that the scripts measure: the paper's families, then the systems."""


@torch.no_grad()
def system_model(spec: ModelSpec) -> Model:
    """Return a model in which no parameter or statistic has equal entries, as in a trained network.

    Otherwise folding could leave out parts, such as an offset that is 0.
    """
    torch.manual_seed(0)
    model = model_from_spec(spec).eval()
    for tensor in model.state_dict().values():
        if tensor.is_floating_point() and tensor.numel() > 1 and bool((tensor == tensor.flatten()[0]).all()):
            noise = torch.randn_like(tensor).clamp(-3, 3)
            tensor.copy_(0.02 * noise if tensor.flatten()[0] == 0 else tensor * (1 + 0.1 * noise))
    return model


def system_pair(name: str) -> dict[str, Model]:
    """Return ``trained`` → the model of a system with random weights, and ``plain`` → the plain twin, if it exists."""
    system = SYSTEMS[name]
    model = system_model(system.timed_spec)
    return {"trained": model} if system.plain is None else {"trained": model, "plain": system.plain(model)}
