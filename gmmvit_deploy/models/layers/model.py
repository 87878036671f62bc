"""`Model`: the base class of the image classifiers of all families."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from gmmvit_deploy.errors import SpecError
from gmmvit_deploy.inference.precision import Role
from gmmvit_deploy.models.layers.roles import layer_role
from gmmvit_deploy.models.scores.step import Oddity
from gmmvit_deploy.models.specs import ModelSpec, OutputName

if TYPE_CHECKING:
    from gmmvit_deploy.models.layers.token_grids import TokenGrids


class UnitLength(nn.Module):
    """y = x / ‖x‖₂ for each image; zeros remain.  forward: features (B, D) → (B, D)."""

    role: Role = "pooling"

    def forward(self, features: Tensor) -> Tensor:
        length: Tensor = torch.linalg.vector_norm(features, dim=-1, keepdim=True)
        return features / length.clamp_min(1e-12)


class Model(nn.Module):
    """Abstract base class: each family derives its model class from `Model`.

    foreign: True if another package defines the network, so that the modules do not declare the roles of operators.
    unfolded_patches: (name, side) of the first linear layer, if it reads overlapping patches that an `Unfold` cuts.
    outputs: the outputs that `answers` returns and that export writes.
    normalises: True if `answers` gives the features unit length.
    returns_all: True if ``forward`` returns all outputs, as a tuple: only while the model is exported.
    forward: images (B, c, S, S), normalised, float32 → the first of the outputs: logits (B, C), or features (B, D).
    """

    foreign: ClassVar[bool] = False
    outputs: tuple[OutputName, ...] = ("logits",)
    normalises: bool = False
    returns_all: bool = False
    unfolded_patches: ClassVar[tuple[str, int] | None] = None
    spec: ModelSpec

    def __init__(self) -> None:
        super().__init__()
        self.unit_length = UnitLength()

    @property
    def pooling(self) -> str:
        """The vector of the tokens that the features are, in words; a family that pools otherwise overrides it."""
        return "class token"

    def logits_and_features(self, images: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return (logits, features), with None for what the model does not have.  Features (B, D): the head reads them.

        A model that overrides ``forward`` in place of this method has logits and no features.
        """
        if type(self).forward is Model.forward:
            raise NotImplementedError
        return self.forward(images), None  # type: ignore[return-value]  # such a forward returns a tensor

    def answers(self, images: Tensor) -> tuple[Tensor, ...]:
        """Return the ``outputs`` of the model for a batch of images, in their order."""
        logits, features = self.logits_and_features(images)
        if self.normalises and features is not None:
            features = self.unit_length(features)
        named = {"logits": logits, "features": features}
        missing = [name for name in self.outputs if named[name] is None]
        if missing:
            raise SpecError(f"{self.spec.description}: the network has no {missing[0]}")
        return tuple(answer for name in self.outputs if (answer := named[name]) is not None)

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, ...]:
        answers = self.answers(images)
        return answers if self.returns_all else answers[0]

    def oddities(self) -> Iterator[tuple[str, Oddity]]:
        """Yield (name of a tensor or module, unusual property), beside those of the steps (`Step.oddities`)."""
        yield from ()

    def classifier_heads(self) -> Iterator[tuple[str, nn.Linear]]:
        """Yield (name, layer) of each linear layer that computes logits; a distilled model has two."""
        for name, layer in self.named_modules():
            if isinstance(layer, nn.Linear) and layer_role(layer) == "head":
                yield name, layer

    def text_embeddings(self) -> Tensor | None:
        """Return the matrix (C, D) that computes the logits if the classes are texts; None if training gave it."""
        return None

    def observed_grids(self) -> TokenGrids | None:
        """Return the grids of the tokens of each attention of a foreign network; None if all patches form squares."""
        return None

    def why_no_rollout(self) -> str:
        """Return why an attention rollout, which assumes equal weights of the last tokens, is wrong, or ""."""
        return ""
