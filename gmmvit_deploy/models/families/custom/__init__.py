"""Models of a user's own class: ``--model FILE.py:CLASS`` names the code, which is no part of this package."""

from __future__ import annotations

from gmmvit_deploy.errors import SpecError
from gmmvit_deploy.models.families.custom.spec import CustomSpec, why_not_permitted
from gmmvit_deploy.models.families.family import Family, Network
from gmmvit_deploy.models.specs import MaskSpec, ModelSpec


def _network() -> Network:
    from gmmvit_deploy.models.families.custom.model import build

    return Network(build=build)


def _small(mask: MaskSpec) -> ModelSpec:
    raise SpecError("a model of a user's own class has no small example, because the class is in a file of the user")


CUSTOM = Family(
    name="custom",
    spec=CustomSpec,
    network=_network,
    sources=(),
    mask_kinds=("plain",),
    small=_small,
    blocks=lambda spec: (),
    unavailable=why_not_permitted,
)
