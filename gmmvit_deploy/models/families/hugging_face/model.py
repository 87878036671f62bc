"""A model of Hugging Face transformers as a `Model` of this package.

A classifier has logits = network(images).logits = W x + b; its features are x, the vector that the last layer reads.
`backbone.pooled` says what the features of a backbone without a classifier are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from torch import Tensor, nn

from gmmvit_deploy.errors import SpecError
from gmmvit_deploy.models.families.hugging_face.network import network_from_spec
from gmmvit_deploy.models.families.hugging_face.spec import HuggingFaceSpec
from gmmvit_deploy.models.families.hugging_face.towers import pooled
from gmmvit_deploy.models.layers.answered_network import AnsweredNetwork

_HEADS = ("classifier", "cls_classifier", "distillation_classifier", "head")


class HuggingFaceModel(AnsweredNetwork):
    """A classifier of transformers, or a backbone without a classifier, whose spec has 0 classes.

    reverses: True if the network reads the channels in reverse order; False after the pass `folding.reverse_channels`.
    """

    package: ClassVar[str] = "transformers"
    spec: HuggingFaceSpec

    def __init__(self, spec: HuggingFaceSpec) -> None:
        super().__init__(spec)
        self.reverses = spec.bgr
        if not spec.classes:
            self.outputs = ("features",)
        self.answer_calls()

    def built_network(self) -> nn.Module:
        return network_from_spec(self.spec)

    def logits_of(self, network: nn.Module, images: Tensor) -> Tensor:
        output: Any = network(images[:, [2, 1, 0]] if self.reverses else images)
        answer: Tensor = output.logits if self.spec.classes else pooled(network, output, self.spec)
        return answer

    @property
    def pooling(self) -> str:
        if self.spec.classes:
            return f"what {next(iter(self.classifier_heads()))[0].removeprefix('network.')} reads"
        return super().pooling if self.spec.pool == "cls" else "the pooler of transformers (pooler_output)"

    def logits_and_features(self, images: Tensor) -> tuple[Tensor | None, Tensor | None]:
        if not self.spec.classes:
            return None, self.logits_of(self.network, images)
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

    def text_embeddings(self) -> Tensor | None:
        return self._classifier().weight.detach() if self.spec.prompts and "logits" in self.outputs else None

    def _classifier(self) -> nn.Linear:
        heads = dict(self.classifier_heads())
        if len(heads) != 1:
            held = " and ".join(heads) or "none"
            raise SpecError(
                f"{self.title}: features are what the linear layer of the classifier reads, and the network has "
                f"{len(heads)} such layers: {held}"
            )
        return next(iter(heads.values()))

    def classifier_heads(self) -> Iterator[tuple[str, nn.Linear]]:
        for name in _HEADS:
            layer = getattr(self.network, name, None)
            if isinstance(layer, nn.Linear):
                yield f"network.{name}", layer
