"""A model of Hugging Face transformers as a `Model` of this package: logits = network(images).logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from torch import Tensor, nn

from gmmvit_deploy.families.hugging_face.network import network_from_spec
from gmmvit_deploy.families.hugging_face.spec import HuggingFaceSpec
from gmmvit_deploy.layers.answered_network import AnsweredNetwork

__all__ = ["HuggingFaceModel"]

_HEADS = ("classifier", "cls_classifier", "distillation_classifier", "head")


class HuggingFaceModel(AnsweredNetwork):
    """A classifier of transformers.

    forward: images (B, c, height, width), normalised, float32 → logits (B, C).
    """

    package: ClassVar[str] = "transformers"
    spec: HuggingFaceSpec

    def __init__(self, spec: HuggingFaceSpec) -> None:
        super().__init__(spec)
        self.answer_calls()

    def built_network(self) -> nn.Module:
        return network_from_spec(self.spec)

    def logits_of(self, network: nn.Module, images: Tensor) -> Tensor:
        output: Any = network(images)
        logits: Tensor = output.logits
        return logits

    def classifier_heads(self) -> Iterator[tuple[str, nn.Linear]]:
        """Yield (name, layer) of each linear layer that computes logits."""
        for name in _HEADS:
            layer = getattr(self.network, name, None)
            if isinstance(layer, nn.Linear):
                yield f"network.{name}", layer
