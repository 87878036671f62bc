"""Networks around a model of transformers without a classifier: a backbone with a linear layer, and the image tower.

    backbone        logits = W features + b      features = image_embeds or pooler_output, or the class token
    CLIP, SigLIP    logits = W n(x) + b          x: the image embedding,  n(x) = x / |x|

`checkpoints._zero_shot` computes W and b of the second from the texts of the classes. The networks have no text tower.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput

from gmmvit_deploy.errors import SpecError
from gmmvit_deploy.models.families.hugging_face.spec import HuggingFaceSpec

TENSORS = ("vision_model.", "visual_projection.")
"""What the names of the tensors of the image tower begin with."""


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


class ImageTower(nn.Module):
    """The image tower of ``CLIPModel`` or ``SiglipModel``, under their names of its tensors, as a backbone.

    config: that of the whole model.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        images = config.vision_config
        self.vision_model: nn.Module = AutoModel.from_config(images)
        width = getattr(config, "projection_dim", None)  # SigLIP has no projection of its own
        self.visual_projection = nn.Identity() if width is None else nn.Linear(images.hidden_size, width, bias=False)
        self.width: int = width or images.hidden_size

    def embedding(self, pixel_values: Tensor) -> Tensor:
        projected: Tensor = self.visual_projection(self.vision_model(pixel_values=pixel_values).pooler_output)
        return projected

    def forward(self, pixel_values: Tensor) -> Any:
        return BaseModelOutputWithPooling(pooler_output=self.embedding(pixel_values))


class ZeroShotNetwork(ImageTower):
    """The image tower with a linear layer.

    classes: C, the number of rows of W.  normalises: False leaves n out, a mistake that parity names.
    """

    def __init__(self, config: Any, classes: int) -> None:
        super().__init__(config)
        self.normalises = True
        self.classifier = nn.Linear(self.width, classes)

    def forward(self, pixel_values: Tensor) -> Any:
        embedding = self.embedding(pixel_values)
        if self.normalises:
            embedding = embedding / torch.linalg.vector_norm(embedding, dim=-1, keepdim=True)
        return ImageClassifierOutput(logits=self.classifier(embedding))


def without_normalised_embeddings(model: Any) -> bool:
    """Make a mistake in a model: multiply the embedding of the image, of any length, by W."""
    network = model.network
    if not isinstance(network, ZeroShotNetwork):
        return False
    network.normalises = False
    return True
