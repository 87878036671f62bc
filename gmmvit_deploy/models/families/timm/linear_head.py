"""The linear classifier with which DINO and DINOv2 evaluate a backbone.

features = [c of block L−n+1, …, c of block L]      c: the class token after the last norm; n = ``blocks``, L blocks
features = [features, m]                            with ``average``; m: the mean of the normed patches of block L
features = c[0], m[0], c[1], m[1], …                with ``interleaved``, as in DINO's eval_linear.py; only for n = 1
logits = W features + b
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gmmvit_deploy.errors import SpecError
from gmmvit_deploy.models.layers.roles import with_role

__all__ = ["LinearHead"]


class LinearHead(nn.Module):
    """A linear classifier that reads the class tokens of the last blocks of a vision transformer.

    forward: (network, images (B, c, height, width)) → (logits (B, C), features (B, D)).
    """

    operator_roles: ClassVar[dict[str, Any]] = {"mean": "pooling"}

    def __init__(self, dim: int, *, blocks: int, average: bool, interleaved: bool, classes: int) -> None:
        super().__init__()
        self.blocks, self.average, self.interleaved = blocks, average, interleaved
        self.linear = with_role(nn.Linear((blocks + average) * dim, classes), "head")

    @staticmethod
    def for_network(network: Any, *, blocks: int, average: bool, interleaved: bool, classes: int) -> LinearHead:
        """Return a head with random weights.

        Errors: SpecError when the network has no class token, or fewer blocks than ``blocks``.
        """
        depth = len(getattr(network, "blocks", ()))
        if not hasattr(network, "get_intermediate_layers") or not getattr(network, "num_prefix_tokens", 0):
            raise SpecError(
                f"a linear head reads class tokens, and {type(network).__name__} has no class token",
                hint="type --model with the architecture of the backbone, a vision transformer with a class token",
            )
        if blocks > depth:
            # The number of features fits already, and with the mean of the patches it also fits one block less.
            raise SpecError(
                f"--set head_blocks={blocks}: the model has {depth} blocks",
                hint=f"type --set head_blocks={depth} --set head_average=yes"
                if blocks == depth + 1 and not average
                else "type --head with the file of the linear head that was trained on this backbone",
            )
        return LinearHead(network.embed_dim, blocks=blocks, average=average, interleaved=interleaved, classes=classes)

    def forward(self, network: Any, images: Tensor) -> tuple[Tensor, Tensor]:
        outputs = network.get_intermediate_layers(images, n=self.blocks, return_prefix_tokens=True, norm=True)
        tokens = torch.cat([prefix[:, 0] for _, prefix in outputs], dim=-1)
        if self.average:
            mean = outputs[-1][0].mean(dim=1)
            tokens = (
                torch.stack([tokens, mean], dim=-1).flatten(1) if self.interleaved else torch.cat([tokens, mean], -1)
            )
        return self.linear(tokens), tokens
