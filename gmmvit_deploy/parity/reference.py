"""The two references: eager PyTorch in float32, which was trained, and in float64, which is the truth."""

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
    """The trained module of a bundle, nothing folded, in both precisions on the same inputs.

    model: float32; exact: the same in float64.  They start from the same float32 tensor: how
    pixels are normalised belongs to the input and is not what float64 is the truth of.
    """

    def __init__(self, bundle: Bundle) -> None:
        """Errors: BundleError, CheckpointError when its weights are not its manifest's."""
        self._eager = EagerRunner(bundle)
        self.model: Model = self._eager.model
        self.exact: Model = copy.deepcopy(self.model).double()

    def tensors(self, inputs: NDArray[Any]) -> torch.Tensor:
        """What the bundle's graph takes → float32 (B, channels, height, width), normalised."""
        return self._eager.tensors(inputs)

    def logits(self, inputs: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """(float32 logits, float64 logits), both (B, C)."""
        tensors = self.tensors(inputs)
        with torch.inference_mode():
            trained, exact = self.model(tensors), self.exact(tensors.double())
        return trained.numpy(), exact.numpy()
