"""What every family's module is: a classifier that knows its spec."""

from __future__ import annotations

from torch import nn

from gmmvit_deploy.specs import ModelSpec

__all__ = ["Model"]


class Model(nn.Module):
    """Abstract: each family derives its own.

    spec: what it was built from.
    forward: images (B, c, S, S), normalised, float32 → logits (B, C).
    """

    spec: ModelSpec
