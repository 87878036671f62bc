"""The patch embedding of vit-pytorch's later releases: LayerNorm, a linear layer, and LayerNorm again.

x = norm(W · norm(patch) + b)        patch: the c·p·p values of a patch, in the order (row, column, channel)
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from gmmvit_deploy.models.layers.blocks import PatchEmbedding, flat_patches, layer_norm


class NormedPatchEmbedding(PatchEmbedding):
    """A `PatchEmbedding` with a norm of the patch before the linear layer, and a norm of the token after the layer."""

    def __init__(self, patch_size: int, dim: int, *, channels: int) -> None:
        super().__init__(patch_size, dim, channels=channels)
        self.patch_norm: nn.LayerNorm = layer_norm(channels * patch_size**2)
        self.token_norm: nn.LayerNorm = layer_norm(dim)

    def forward(self, images: Float[Tensor, "batch channels side side"]) -> Float[Tensor, "batch n dim"]:
        tokens: Tensor = self.token_norm(self.project(self.patch_norm(flat_patches(images, self.patch_size))))
        return tokens
