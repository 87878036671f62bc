"""Which family a released checkpoint is of, and that family's names."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from gmmvit_deploy.checkpoints import released_cait, released_pit, released_swin, released_t2t, released_vit
from gmmvit_deploy.specs import ModelSpec

__all__ = ["family_of", "known_unused", "released_names"]

_FAMILIES: dict[str, ModuleType] = {
    "vit": released_vit,
    "swin": released_swin,
    "cait": released_cait,
    "pit": released_pit,
    "t2t": released_t2t,
}


def family_of(names: Mapping[str, object]) -> Any:
    """The module that knows these names, None when none does."""
    return next((module for module in _FAMILIES.values() if module.recognises(names)), None)


def released_names(spec: ModelSpec) -> dict[str, str]:
    """Name in our model → name in the released file, for every tensor of the trained model."""
    names: dict[str, str] = _FAMILIES[spec.family].released_names(spec)
    return names


def known_unused(spec: ModelSpec) -> dict[str, str]:
    """Names a released file may hold that the network never reads → why not."""
    unused: dict[str, str] = _FAMILIES[spec.family].known_unused(spec)
    if spec.mask.closed_form:
        reason = "a stored base; this model was trained with the closed form"
        alphas = [name for name in released_names(spec).values() if name.endswith(".mask.alpha")]
        unused = unused | {f"{alpha.removesuffix('.alpha')}.mask": reason for alpha in alphas}
    return unused
