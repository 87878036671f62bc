"""The two references of parity: the trained model in eager PyTorch, in float32 and in float64.

The float32 logits show what the trained model computes. The float64 logits serve as the exact result.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from numpy.typing import NDArray

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.models.families import family_of
from gmmvit_deploy.models.folding.dead_masks import dead_masks
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.specs import OutputName
from gmmvit_deploy.parity.inputs import Batch
from gmmvit_deploy.runtimes.programs.image_batches import image_hashes
from gmmvit_deploy.runtimes.runners.eager import EagerRunner


def why_no_model(bundle: Bundle) -> str:
    """Return why this process cannot build the model of a bundle; empty if it can."""
    spec = bundle.manifest.spec
    return family_of(spec).unavailable(spec)


class Reference:
    """The trained model of a bundle, in float32 and, as ``exact``, in float64; both normalise pixels in float32."""

    def __init__(self, bundle: Bundle, *, remembers: bool = False) -> None:
        """remembers: keep the answers to each batch, for a caller that judges runners of the same images in turn.

        Errors: BundleError, CheckpointError when the bundle's weights do not match its manifest.
        """
        self._remembered: dict[tuple[bool, tuple[str, ...]], dict[OutputName, NDArray[Any]]] | None = (
            {} if remembers else None
        )
        self.bundle = bundle
        self._eager = EagerRunner(bundle)
        self.model: Model = self._eager.model
        self.exact: Model = copy.deepcopy(self.model).double()

    @cached_property
    def dead_attentions(self) -> tuple[str, ...]:
        """The names of the attentions whose mask has no influence on the logits."""
        return tuple(attention for attention, _ in dead_masks(self.model))

    def tensors(self, inputs: NDArray[Any]) -> torch.Tensor:
        """Return inputs of the graph as normalised float32 (B, channels, height, width)."""
        return self._eager.tensors(inputs)

    def logits(self, inputs: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return (float32 logits, float64 logits), both (B, C).  A model without logits gives its features (B, D)."""
        of = self.model.outputs[0]
        return self.answers(inputs, exact=False)[of], self.answers(inputs, exact=True)[of]

    def of_features(self) -> Reference:
        """Return the same models with the features in place of the logits."""
        other = copy.copy(self)
        other.model, other.exact = copy.copy(self.model), copy.copy(self.exact)
        other.model.outputs = other.exact.outputs = ("features",)
        other._remembered = None  # the same inputs have other answers there
        return other

    def answers(self, inputs: NDArray[Any], *, exact: bool) -> dict[OutputName, NDArray[Any]]:
        """Return name of an output of the model → its values, in float64 if ``exact``, else in float32."""
        if self._remembered is None:
            return self._computed(inputs, exact)
        key = (exact, tuple(image_hashes(inputs)))
        if key not in self._remembered:
            self._remembered[key] = self._computed(inputs, exact)
        return self._remembered[key]

    def _computed(self, inputs: NDArray[Any], exact: bool) -> dict[OutputName, NDArray[Any]]:
        tensors = self.tensors(inputs)
        with torch.inference_mode():
            values = self.exact.answers(tensors.double()) if exact else self.model.answers(tensors)
        return {name: value.numpy() for name, value in zip(self.model.outputs, values, strict=True)}


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """A batch with PyTorch's logits: ``trained`` in float32, ``exact`` in float64, both (B, C).

    If this process cannot build the model, both are the float32 logits stored at export.
    features: (float32, float64), both (B, D), of a bundle with logits and features; else None. For a bundle without
    logits, the features take the place of the logits.
    counted: True for images of which only decisions, right answers and neighbours are counted; there, ``exact`` holds
    the float32 values too.
    """

    batch: Batch
    trained: NDArray[Any]
    exact: NDArray[Any]
    features: tuple[NDArray[Any], NDArray[Any]] | None
    counted: bool = False


def known_batch(reference: Reference, batch: Batch, *, counted: bool = False) -> Known:
    trained = reference.answers(batch.inputs, exact=False)
    exact = trained if counted else reference.answers(batch.inputs, exact=True)
    of = reference.model.outputs[0]
    features = (trained["features"], exact["features"]) if len(trained) > 1 else None
    return Known(batch, trained[of], exact[of], features, counted)
