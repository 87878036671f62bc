"""The image tower of a CLIP or SigLIP, and the classifier that it becomes when the texts of its classes are known.

    logits = W n(x) + b        x: the image embedding,  n(x) = x / |x|

`checkpoints._zero_shot` computes W and b from the texts. The networks have no text tower.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput

TENSORS = ("vision_model.", "visual_projection.")
"""What the names of the tensors of the image tower begin with."""


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
