"""The two references of parity: the trained model in eager PyTorch, in float32 and in float64.

The float32 logits show what the trained model computes. The float64 logits serve as the exact result.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import torch
from numpy.typing import NDArray

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.models.families import family_of
from gmmvit_deploy.models.folding.dead_masks import dead_masks
from gmmvit_deploy.models.layers.model import Model
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
        self._remembered: dict[tuple[bool, tuple[str, ...]], dict[str, NDArray[Any]]] | None = {} if remembers else None
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

    def answers(self, inputs: NDArray[Any], *, exact: bool) -> dict[str, NDArray[Any]]:
        """Return name of an output of the model → its values, in float64 if ``exact``, else in float32."""
        if self._remembered is None:
            return self._computed(inputs, exact)
        key = (exact, tuple(image_hashes(inputs)))
        if key not in self._remembered:
            self._remembered[key] = self._computed(inputs, exact)
        return self._remembered[key]

    def _computed(self, inputs: NDArray[Any], exact: bool) -> dict[str, NDArray[Any]]:
        tensors = self.tensors(inputs)
        with torch.inference_mode():
            values = self.exact.answers(tensors.double()) if exact else self.model.answers(tensors)
        return {name: value.numpy() for name, value in zip(self.model.outputs, values, strict=True)}


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """A batch with what PyTorch computes for it.

    values: name of an output → its values in float32.  exact_values: computes them in float64, once.
    If this process cannot build the model, both are the float32 logits stored at export.
    gate_only: True for images on which only what the gate counts is judged, and nothing in float32
    (`ParityOptions.numeric_images`).
    """

    batch: Batch
    values: Mapping[str, NDArray[Any]]
    exact_values: Callable[[], Mapping[str, NDArray[Any]]]
    gate_only: bool = False

    @property
    def trained(self) -> NDArray[Any]:
        """The logits (B, C) in float32; of a bundle without logits, its features (B, D)."""
        return next(iter(self.values.values()))

    @property
    def exact(self) -> NDArray[Any]:
        """``trained`` in float64."""
        return next(iter(self.exact_values().values()))

    @property
    def features(self) -> NDArray[Any] | None:
        """The features (B, D) in float32 of a bundle with logits and features; None for others."""
        return self.values["features"] if len(self.values) > 1 else None


def known_batch(reference: Reference, batch: Batch, *, gate_only: bool = False) -> Known:
    exact = cache(partial(reference.answers, batch.inputs, exact=True))
    return Known(batch, reference.answers(batch.inputs, exact=False), exact, gate_only)
