"""The classifier that a CLIP or SigLIP becomes when the texts of its classes are known.

    logits = W n(x) + b        x: the image embedding,  n(x) = x / |x|

`checkpoints._zero_shot` computes W and b from the texts. The network has no text tower.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel
from transformers.modeling_outputs import ImageClassifierOutput


class ZeroShotNetwork(nn.Module):
    """The image tower of ``CLIPModel`` or ``SiglipModel``, under their names of its tensors, and a linear layer.

    config: that of the whole model.  classes: C, the number of rows of W.
    normalises: False leaves n out, a mistake that parity names.
    """

    def __init__(self, config: Any, classes: int) -> None:
        super().__init__()
        images = config.vision_config
        self.normalises = True
        self.vision_model: nn.Module = AutoModel.from_config(images)
        width = getattr(config, "projection_dim", None)  # SigLIP has no projection of its own
        self.visual_projection = nn.Identity() if width is None else nn.Linear(images.hidden_size, width, bias=False)
        self.classifier = nn.Linear(width or images.hidden_size, classes)

    def forward(self, pixel_values: Tensor) -> ImageClassifierOutput:
        embeddings: Tensor = self.visual_projection(self.vision_model(pixel_values=pixel_values).pooler_output)
        if self.normalises:
            embeddings = embeddings / torch.linalg.vector_norm(embeddings, dim=-1, keepdim=True)
        return ImageClassifierOutput(logits=self.classifier(embeddings))


def without_normalised_embeddings(model: Any) -> bool:
    """Make a mistake in a model: multiply the embedding of the image, of any length, by W."""
    network = model.network
    if not isinstance(network, ZeroShotNetwork):
        return False
    network.normalises = False
    return True
