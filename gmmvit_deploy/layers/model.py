"""Base class of the models of all families: a classifier with its spec."""

from __future__ import annotations

from torch import nn

from gmmvit_deploy.specs import ModelSpec

__all__ = ["Model"]


class Model(nn.Module):
    """Abstract: each family derives its own.

    spec: the spec that the model was built from.
    forward: images (B, c, S, S), normalised, float32 → logits (B, C).
    """

    spec: ModelSpec
