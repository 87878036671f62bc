"""`Model`: the base class of the image classifiers of all families."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from torch import nn

from gmmvit_deploy.layers.roles import layer_role
from gmmvit_deploy.scores.step import Oddity
from gmmvit_deploy.specs import ModelSpec

if TYPE_CHECKING:
    from gmmvit_deploy.layers.token_grids import TokenGrids

__all__ = ["Model"]


class Model(nn.Module):
    """Abstract base class: each family derives its model class from `Model`.

    foreign: True if another package defines the network, so that the modules do not declare the roles of operators.
    unfolded_patches: (name, side) of the first linear layer, if it reads overlapping patches of side × side pixels that
    an `Unfold` cuts, or a norm of these patches; otherwise None.
    spec: the spec that the model was built from.
    forward: images (B, c, S, S), normalised, float32 → logits (B, C), for B images with c channels and C classes.
    """

    foreign: ClassVar[bool] = False
    unfolded_patches: ClassVar[tuple[str, int] | None] = None
    spec: ModelSpec

    def oddities(self) -> Iterator[tuple[str, Oddity]]:
        """Yield (name of a tensor or module, unusual property) for the audit of a checkpoint.

        The steps on the attention scores report their own properties (`scores.step.Step.oddities`).
        """
        yield from ()

    def classifier_heads(self) -> Iterator[tuple[str, nn.Linear]]:
        """Yield (name, layer) of each linear layer that computes logits: by default the layers with the role ``head``.

        A distilled model has two such layers.
        """
        for name, layer in self.named_modules():
            if isinstance(layer, nn.Linear) and layer_role(layer) == "head":
                yield name, layer

    def observed_grids(self) -> TokenGrids | None:
        """Return the grids of the tokens of each attention, with paths in ``network``, if another package defines it.

        Returns None for a network of this package, whose patches form squares.
        """
        return None

    def why_no_rollout(self) -> str:
        """Return a reason, beyond the weights, why an attention rollout does not describe the logits; else "".

        A rollout describes a head that reads the tokens of the last block, each with the same weight.
        """
        return ""
