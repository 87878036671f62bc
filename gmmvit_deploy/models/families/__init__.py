"""All model families (architectures), listed in `FAMILIES`, and `CUSTOM` for classes of users.

The code of each family is in a separate folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.errors import SpecError
from gmmvit_deploy.models.families.cait import CAIT
from gmmvit_deploy.models.families.custom import CUSTOM
from gmmvit_deploy.models.families.deepvit import DEEPVIT
from gmmvit_deploy.models.families.eanet import EANET
from gmmvit_deploy.models.families.family import Family
from gmmvit_deploy.models.families.hugging_face import HUGGING_FACE
from gmmvit_deploy.models.families.naive_vit import NAIVE_VIT
from gmmvit_deploy.models.families.pit import PIT
from gmmvit_deploy.models.families.rmt import RMT
from gmmvit_deploy.models.families.swin import SWIN
from gmmvit_deploy.models.families.t2t import T2T
from gmmvit_deploy.models.families.timm import TIMM
from gmmvit_deploy.models.families.vit import VIT
from gmmvit_deploy.models.families.vit_pytorch import VIT_PYTORCH
from gmmvit_deploy.models.specs import MaskSpec, ModelSpec, spec_to_json

if TYPE_CHECKING:
    from gmmvit_deploy.models.layers.model import Model

__all__ = [
    "CUSTOM",
    "FAMILIES",
    "PRESETS",
    "Family",
    "family_named",
    "family_of",
    "family_of_preset",
    "model_from_spec",
    "preset_spec",
    "spec_from_json",
    "spec_to_json",
]

FAMILIES: tuple[Family, ...] = (
    VIT, SWIN, CAIT, PIT, T2T, NAIVE_VIT, DEEPVIT, RMT, EANET, VIT_PYTORCH, TIMM, HUGGING_FACE,
)  # fmt: skip
"""The families whose code is in this package.  `CUSTOM`, the record of a user's own classes, is not among them."""

PRESETS: Mapping[str, Callable[[int, int, MaskSpec], ModelSpec]] = {
    name: preset for family in FAMILIES for name, preset in family.presets.items()
}
"""Presets of all families: name → function that takes (classes, image size, mask) and returns a spec.

No file requires a preset: it only states values that some files do not show, such as the number of heads.
"""


def family_named(name: object) -> Family:
    """Return the family with this name.  Errors: SpecError when the name is unknown."""
    for family in (*FAMILIES, CUSTOM):
        if family.name == name:
            return family
    known = ", ".join(family.name for family in FAMILIES)
    raise SpecError(f"model family {name!r} is not known; known: {known}")


def family_of(spec: ModelSpec) -> Family:
    """Return the family of a spec.  Errors: SpecError when the family is unknown."""
    return family_named(spec.family)


def family_of_preset(preset: str) -> Family:
    """Return the family of a preset.  Errors: SpecError when the name is not in `PRESETS`."""
    for family in FAMILIES:
        if preset in family.presets:
            return family
    raise SpecError(f"preset {preset!r} is not known", hint=f"type one of {', '.join(PRESETS)}")


def model_from_spec(spec: ModelSpec) -> Model:
    """Build the model of a spec with random weights.  The function imports torch."""
    return family_of(spec).build(spec)


def preset_spec(
    name: str, *, classes: int, image_size: int, mask: MaskSpec, spt: bool = False, lsa: bool = False
) -> ModelSpec:
    """Return the spec of a preset.

    spt, lsa: True for the variants with shifted patch tokenisation and with locality self-attention. The released code
    of SPT and LSA reads a class token wherever the network has a class token.
    Errors: SpecError for a name that is not in `PRESETS`, and for a family without such variants.
    """
    family = family_of_preset(name)
    spec = family.presets[name](classes, image_size, mask)
    if not (spt or lsa):
        return spec
    if not family.has_spt_and_lsa:
        others = [other.name for other in FAMILIES if other.has_spt_and_lsa]
        raise SpecError(
            f"preset {name}: a {spec.family} has no SPT and no LSA",
            hint=f"leave spt and lsa out, or take a preset of {', '.join(others)}",
        )
    token = {"class_token": True} if "class_token" in family.spec.__dataclass_fields__ else {}
    changes = {"spt": spt, "lsa": lsa, **token}
    return replace(spec, **changes)  # type: ignore[arg-type]  # the fields are those of the family's own spec


def spec_from_json(data: Mapping[str, Any]) -> ModelSpec:
    """Rebuild a spec from the output of `spec_to_json`.

    Errors: SpecError when the family is unknown, a field is missing or unknown, or a value is invalid.
    """
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
    family = family_named(fields.pop("family", None))
    try:
        fields["mask"] = MaskSpec(**fields["mask"])
        return family.spec(**fields)
    except (TypeError, KeyError) as exc:
        raise SpecError(f"not a model spec: {exc}") from exc
