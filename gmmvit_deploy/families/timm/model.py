"""A model of timm as a `Model` of this package.

    logits = network(images)        network: the module that timm builds
    logits = head(tokens)           with a linear head of DINO (`linear_head`); the tokens are the features
    features = network(images)      without a classifier, as timm builds a network with num_classes 0
    features = network.forward_head(network.forward_features(images), pre_logits=True)      with a classifier

In every attention of the network that calls PyTorch's fused attention function, an `AnsweredAttention` computes the
result in place of this function. The scale, the mask and the bias are then separate modules, so that folding can
replace these modules by constants.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gmmvit_deploy.errors import GmmvitError, SpecError
from gmmvit_deploy.families.timm.network import network_from_spec
from gmmvit_deploy.families.timm.spec import TimmSpec
from gmmvit_deploy.layers.fused_call import (
    AnsweredAttention,
    FusedCall,
    answer_fused_call,
    fused_calls,
    use_fused_calls,
)
from gmmvit_deploy.layers.masked_attention import MaskedAttention
from gmmvit_deploy.layers.model import Model
from gmmvit_deploy.layers.token_grids import Placement, TokenGrids, placements, token_grids, unknown_grids
from gmmvit_deploy.scores.attention import AttentionScores
from gmmvit_deploy.scores.biases import PassedBias
from gmmvit_deploy.scores.scales import Scale
from gmmvit_deploy.scores.step import Step
from gmmvit_deploy.specs import input_shape

__all__ = ["ATTENTION", "MASK", "TimmModel"]

ATTENTION = "attention"
"""The name of the submodule that replaces the fused attention function in an attention without a mask."""
MASK = "mask"
"""The name of the submodule that replaces the fused attention function in an attention with a mask.  The submodule
holds the tensors of the mask, and has the name that `gmmvit_deploy.timm.add_masks` gives to the submodule."""


class TimmModel(Model):
    """A network of timm: a classifier, or a backbone without a classifier, whose spec has 0 classes.

    forward: images (B, c, height, width), normalised, float32 → logits (B, C), or features (B, D).
    """

    foreign: ClassVar[bool] = True
    spec: TimmSpec

    def __init__(self, spec: TimmSpec) -> None:
        super().__init__()
        self.spec = spec
        if not spec.classes:
            self.outputs = ("features",)
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
        masked = {} if spec.mask.kind == "plain" else {p.module: p for p in placements(self.network, input_shape(spec))}
        for call in _answerable_calls(self.network, spec):
            _answer(self, call, masked.get(call.module))

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

    def observed_grids(self) -> TokenGrids:
        """Run timm's own network without data: in this network, the fused attention function is still called."""
        with torch.device("meta"):
            network = network_from_spec(self.spec)
        try:
            return token_grids(network, input_shape(self.spec))
        # The network is code of another package, which raises exceptions of any class.
        except Exception as exc:
            return unknown_grids(network, f"the network cannot run without data: {type(exc).__name__}")

    def why_no_rollout(self) -> str:
        if self.spec.head_blocks > 1:
            return f"the linear head reads the class tokens of the last {self.spec.head_blocks} blocks"
        if self.spec.head_average:
            return "the linear head reads the class token and the mean of the patches with weights of its own"
        return ""


def _answerable_calls(network: nn.Module, spec: TimmSpec) -> list[FusedCall]:
    """Return the calls of the fused attention function, by modules that call the function once in a forward pass.

    Every other call stays as it is: the exporter decomposes the function. If the network cannot run on tensors without
    data, for example because it reads values of tensors, no call is replaced; export then names the reason if the
    network cannot be exported either.
    Errors: SpecError when a call masks the future, when heads of Q share K and V, or when the network does not take
    images of the spec.
    """
    try:
        calls = fused_calls(network, input_shape(spec))
    except GmmvitError:
        raise
    # The network is code of another package, which raises exceptions of any class.
    except Exception:
        _require_run(network, spec)
        return []
    times = Counter(call.module for call in calls)
    return [call for call in calls if times[call.module] == 1]


@torch.no_grad()
def _require_run(network: nn.Module, spec: TimmSpec) -> None:
    """Run the network on an image.  Errors: SpecError when the run fails.  A network without data does not run."""
    if any(parameter.is_meta for parameter in network.parameters()):
        return
    try:
        network(torch.zeros(1, *input_shape(spec)))
    # The arguments come from a file or from the user; many wrong sizes show only when the network runs.
    except Exception as exc:
        height, width = spec.image_shape
        raise SpecError(
            f"timm model {spec.architecture} does not take images of {height} × {width} pixels: "
            f"{type(exc).__name__}: {exc}",
            hint=spec.misfit_hint,
        ) from exc


def _answer(model: TimmModel, call: FusedCall, place: Placement | None) -> None:
    """Replace the fused attention function in the module that makes ``call``.

    place: the grid of the attention's tokens if the attention has a mask, else None.
    """
    bias = None if call.bias is None else PassedBias(model, input_shape(model.spec))
    if place is not None:
        answer_fused_call(model.network.get_submodule(call.module), MASK, MaskedAttention(place, model.spec.mask, bias))
        return
    before: dict[str, Step | None] = {"scale": Scale(call.scale), "bias": bias}
    answer = AnsweredAttention(AttentionScores(before), windows=call.windows)
    answer_fused_call(model.network.get_submodule(call.module), ATTENTION, answer)
