"""A model of timm as a `Model` of this package.

    logits = network(images)        network: the module that timm builds
    logits = head(tokens)           with a linear head of DINO (`linear_head`)

Every attention of the network that calls PyTorch's fused attention function is answered by an `AnsweredAttention`, so
that its scale, its mask and its bias are steps, which the folding passes turn into constants.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from gmmvit_deploy.families.timm.network import network_from_spec
from gmmvit_deploy.families.timm.spec import TimmSpec
from gmmvit_deploy.layers.fused_call import (
    AnsweredAttention,
    FusedCall,
    answer_fused_call,
    fused_calls,
    use_fused_calls,
)
from gmmvit_deploy.layers.model import Model
from gmmvit_deploy.scores.attention import AttentionScores
from gmmvit_deploy.scores.biases import PassedBias
from gmmvit_deploy.scores.scales import Scale
from gmmvit_deploy.scores.step import Step
from gmmvit_deploy.specs import input_shape

__all__ = ["ATTENTION", "TimmModel"]

ATTENTION = "attention"
"""The name of the submodule that answers the fused attention function."""
_DRY_BATCH = 2  # the batch of the dry run in `fused_calls`


class TimmModel(Model):
    """A classifier of timm.

    forward: images (B, c, height, width), normalised, float32 → logits (B, C).
    """

    foreign: ClassVar[bool] = True
    spec: TimmSpec

    def __init__(self, spec: TimmSpec) -> None:
        super().__init__()
        self.spec = spec
        self.network = network_from_spec(spec)
        self.linear_head: nn.Module | None = None
        if spec.head_blocks:
            from gmmvit_deploy.families.timm.linear_head import LinearHead

            self.linear_head = LinearHead.for_network(
                self.network,
                blocks=spec.head_blocks,
                average=spec.head_average,
                interleaved=spec.head_interleaved,
                classes=spec.classes,
            )
        use_fused_calls(self.network)
        for call in fused_calls(self.network, input_shape(spec)):
            _answer(self, call)

    def forward(self, images: Tensor) -> Tensor:
        if self.linear_head is not None:
            tokens: Tensor = self.linear_head(self.network, images)
            return tokens
        logits: Tensor = self.network(images)
        return logits


def _answer(model: TimmModel, call: FusedCall) -> None:
    """Answer the fused attention function in the module of a call."""
    bias, windows = None, None
    if call.bias is not None:
        bias = PassedBias(model, input_shape(model.spec))
        leading = call.bias[0] if len(call.bias) == 4 else 1
        windows = leading // _DRY_BATCH if leading > 1 else None
    before: dict[str, Step | None] = {"scale": Scale(call.scale), "bias": bias}
    answer = AnsweredAttention(AttentionScores(before), windows=windows)
    answer_fused_call(model.network.get_submodule(call.module), ATTENTION, answer)
