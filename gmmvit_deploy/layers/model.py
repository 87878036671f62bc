"""`Model`: the base class of the image classifiers of all families."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from gmmvit_deploy.specs import ModelSpec

__all__ = ["Model"]


class Model(nn.Module):
    """Abstract base class: each family derives its model class from `Model`.

    foreign: True if another package defines the network, so that the modules do not declare the roles of operators.
    spec: the spec that the model was built from.
    forward: images (B, c, S, S), normalised, float32 → logits (B, C), for B images with c channels and C classes.
    """

    foreign: ClassVar[bool] = False
    spec: ModelSpec
