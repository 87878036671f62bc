"""A model of Hugging Face transformers as a `Model` of this package: logits = network(images).logits = W x + b.

The features are x, the vector that the last layer reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from torch import Tensor, nn

from gmmvit_deploy.errors import SpecError
from gmmvit_deploy.families.hugging_face.network import network_from_spec
from gmmvit_deploy.families.hugging_face.spec import HuggingFaceSpec
from gmmvit_deploy.layers.answered_network import AnsweredNetwork

__all__ = ["HuggingFaceModel"]

_HEADS = ("classifier", "cls_classifier", "distillation_classifier", "head")


class HuggingFaceModel(AnsweredNetwork):
    """A classifier of transformers.

    forward: images (B, c, height, width), normalised, float32 → logits (B, C), or features (B, D).
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

    def logits_and_features(self, images: Tensor) -> tuple[Tensor | None, Tensor | None]:
        if "features" not in self.outputs:
            return self.logits_of(self.network, images), None
        read: list[Tensor] = []
        # transformers does not return what the classifier reads, which differs between the architectures.
        handle = self._classifier().register_forward_pre_hook(lambda _, arguments: read.append(arguments[0]))
        try:
            logits = self.logits_of(self.network, images)
        finally:
            handle.remove()
        return logits, read[-1]

    def _classifier(self) -> nn.Linear:
        """Return the linear layer that computes the logits.

        Errors: SpecError when the network has no such layer, or several.
        """
        heads = dict(self.classifier_heads())
        if len(heads) != 1:
            held = " and ".join(heads) or "none"
            raise SpecError(
                f"{self.title}: features are what the linear layer of the classifier reads, and the network has "
                f"{len(heads)} such layers: {held}"
            )
        return next(iter(heads.values()))

    def classifier_heads(self) -> Iterator[tuple[str, nn.Linear]]:
        """Yield (name, layer) of each linear layer that computes logits."""
        for name in _HEADS:
            layer = getattr(self.network, name, None)
            if isinstance(layer, nn.Linear):
                yield f"network.{name}", layer
