"""Spec → model with fresh weights, of whichever family."""

from __future__ import annotations

from gmmvit_deploy.models.cait import CaiT
from gmmvit_deploy.models.pit import PiT
from gmmvit_deploy.models.swin import Swin
from gmmvit_deploy.models.t2t import T2T
from gmmvit_deploy.models.vit import ViT
from gmmvit_deploy.specs import CaiTSpec, ModelSpec, PiTSpec, SwinSpec, T2TSpec

__all__ = ["Model", "model_from_spec"]

Model = ViT | Swin | CaiT | PiT | T2T


def model_from_spec(spec: ModelSpec) -> Model:
    if isinstance(spec, SwinSpec):
        return Swin(spec)
    if isinstance(spec, CaiTSpec):
        return CaiT(spec)
    if isinstance(spec, PiTSpec):
        return PiT(spec)
    if isinstance(spec, T2TSpec):
        return T2T(spec)
    return ViT(spec)
