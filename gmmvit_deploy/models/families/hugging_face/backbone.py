"""The features of a backbone, a network of transformers without a classifier, and a linear layer behind them.

features = image_embeds or pooler_output, or the class token of last_hidden_state        logits = W features + b
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import ImageClassifierOutput

from gmmvit_deploy.errors import SpecError
from gmmvit_deploy.models.families.hugging_face.spec import HuggingFaceSpec


def has_class_token(network: nn.Module) -> bool:
    """Return True if a backbone of transformers has a class token, which is then the first of the tokens."""
    return any(name.rpartition(".")[2] == "cls_token" for name, _ in network.named_parameters())


def pooled(network: nn.Module, output: Any, spec: HuggingFaceSpec) -> Tensor:
    """Return the features (B, D) in the output of a backbone.  Errors: SpecError when it computes none."""
    if spec.pool == "cls":
        token: Tensor = output.last_hidden_state[:, 0]
        return token
    named = (getattr(output, name, None) for name in ("image_embeds", "pooler_output"))
    features: Tensor | None = next((tensor for tensor in named if tensor is not None), None)
    if features is None:
        raise SpecError(
            f"transformers model {spec.description}: transformers computes no pooler_output",
            hint="type --set pool=cls for the class token of last_hidden_state"
            if has_class_token(network)
            else "give the folder of a classifier: this backbone has no class token either",
        )
    return features


class BackboneWithHead(nn.Module):
    """A backbone with the linear layer of ``--head``."""

    def __init__(self, backbone: nn.Module, spec: HuggingFaceSpec) -> None:
        super().__init__()
        self.backbone = backbone
        self.classifier = nn.Linear(spec.head_features, spec.classes)
        self._spec = spec

    def forward(self, pixel_values: Tensor) -> ImageClassifierOutput:
        features = pooled(self.backbone, self.backbone(pixel_values), self._spec)
        return ImageClassifierOutput(logits=self.classifier(features))
