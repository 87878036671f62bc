"""The two references: eager PyTorch in float32, as trained, and in float64, as the exact result."""

from __future__ import annotations

import copy
from typing import Any

import torch
from numpy.typing import NDArray

from gmmvit_deploy.artifacts import Bundle
from gmmvit_deploy.layers.model import Model
from gmmvit_deploy.runners.eager import EagerRunner

__all__ = ["Reference"]


class Reference:
    """The trained module of a bundle, unfolded, in both precisions on the same inputs.

    model: the module in float32.  exact: the module in float64.  Both start from the same normalised
    float32 tensor, so float64 covers the network but not the normalisation of pixels.
    """

    def __init__(self, bundle: Bundle) -> None:
        """Errors: BundleError, CheckpointError when the bundle's weights do not match its manifest."""
        self._eager = EagerRunner(bundle)
        self.model: Model = self._eager.model
        self.exact: Model = copy.deepcopy(self.model).double()

    def tensors(self, inputs: NDArray[Any]) -> torch.Tensor:
        """Convert inputs of the bundle's graph to normalised float32 (B, channels, height, width)."""
        return self._eager.tensors(inputs)

    def logits(self, inputs: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return (float32 logits, float64 logits), both (B, C)."""
        tensors = self.tensors(inputs)
        with torch.inference_mode():
            trained, exact = self.model(tensors), self.exact(tensors.double())
        return trained.numpy(), exact.numpy()
