"""A model of timm as a `Model` of this package.

    logits = network(images)        network: the module that timm builds (`layers.answered_network`)
    logits = head(tokens)           with a linear head of DINO (`linear_head`); the tokens are the features
    features = network(images)      without a classifier, as timm builds a network with num_classes 0
    features = network.forward_head(network.forward_features(images), pre_logits=True)      with a classifier

The masks of the spec are on the attentions that `gmmvit_deploy.timm.add_masks` would choose.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from torch import Tensor, nn

from gmmvit_deploy.models.families.timm.network import network_from_spec
from gmmvit_deploy.models.families.timm.spec import TimmSpec
from gmmvit_deploy.models.layers.answered_network import AnsweredNetwork
from gmmvit_deploy.models.layers.fused_call import use_fused_calls
from gmmvit_deploy.models.layers.token_grids import placements
from gmmvit_deploy.models.specs import input_shape

__all__ = ["TimmModel"]


class TimmModel(AnsweredNetwork):
    """A network of timm: a classifier, or a backbone without a classifier, whose spec has 0 classes.

    forward: images (B, c, height, width), normalised, float32 → logits (B, C), or features (B, D).
    """

    package: ClassVar[str] = "timm"
    spec: TimmSpec

    def __init__(self, spec: TimmSpec) -> None:
        super().__init__(spec)
        if not spec.classes:
            self.outputs = ("features",)
        self.linear_head: nn.Module | None = None
        if spec.head_blocks:
            from gmmvit_deploy.models.families.timm.linear_head import LinearHead

            self.linear_head = LinearHead.for_network(
                self.network,
                blocks=spec.head_blocks,
                average=spec.head_average,
                interleaved=spec.head_interleaved,
                classes=spec.classes,
            )
        use_fused_calls(self.network)
        masked = {} if spec.mask.kind == "plain" else {p.module: p for p in placements(self.network, input_shape(spec))}
        self.answer_calls(masked)

    def built_network(self) -> nn.Module:
        return network_from_spec(self.spec)

    def logits_and_features(self, images: Tensor) -> tuple[Tensor | None, Tensor | None]:
        network: Any = self.network
        if self.linear_head is not None:
            both: tuple[Tensor, Tensor] = self.linear_head(network, images)
            return both
        if not self.spec.classes:
            return None, network(images)
        if "features" not in self.outputs:
            return network(images), None
        tokens = network.forward_features(images)
        features = network.forward_head(tokens, pre_logits=True)
        return (network.forward_head(tokens) if "logits" in self.outputs else None), features

    def classifier_heads(self) -> Iterator[tuple[str, nn.Linear]]:
        """Yield (name, layer) of each linear layer that computes logits."""
        if self.linear_head is not None:
            yield "linear_head.linear", self.linear_head.get_submodule("linear")  # type: ignore[misc]
            return
        get = getattr(self.network, "get_classifier", None)
        heads = () if get is None else get()
        listed = heads if isinstance(heads, tuple | list) else (heads,)
        for name, layer in self.named_modules():
            if isinstance(layer, nn.Linear) and any(layer is head for head in listed):
                yield name, layer

    def why_no_rollout(self) -> str:
        if self.spec.head_blocks > 1:
            return f"the linear head reads the class tokens of the last {self.spec.head_blocks} blocks"
        if self.spec.head_average:
            return "the linear head reads the class token and the mean of the patches with weights of its own"
        return ""

    def computes_built_network(self) -> bool:
        return super().computes_built_network() and self.linear_head is None
