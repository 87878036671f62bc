"""`AnsweredNetwork`: the base class of models whose network another package builds.

    logits = network(images)        network: the module that the other package builds

In every attention of the network that calls PyTorch's fused attention function, an `AnsweredAttention` computes the
result in place of this function. The scale, the mask and the bias are then modules that folding can replace.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from gmmvit_deploy.errors import GmmvitError, SpecError
from gmmvit_deploy.models.layers.fused_call import AnsweredAttention, FusedCall, answer_fused_call, single_calls
from gmmvit_deploy.models.layers.masked_attention import MaskedAttention
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.layers.token_grids import Placement, TokenGrids, token_grids, unknown_grids
from gmmvit_deploy.models.scores.attention import AttentionScores
from gmmvit_deploy.models.scores.biases import PassedBias
from gmmvit_deploy.models.scores.scales import Scale
from gmmvit_deploy.models.scores.step import Step
from gmmvit_deploy.models.specs import ModelSpec, input_shape

ATTENTION = "attention"
"""The submodule that replaces the fused attention function in an attention without a mask."""
MASK = "mask"
"""The submodule that does so in an attention with a mask, named as `gmmvit_deploy.timm.add_masks` names it."""
_ROUNDING = 1e-9
"""Largest difference of the float64 logits, relative to the largest logit.  A wrong epsilon of a norm changes them by
1e-5."""


class AnsweredNetwork(Model):
    """Abstract base class: a classifier whose ``network`` another package builds.

    package: the name of the package, for messages.
    forward: images (B, c, height, width), normalised, float32 → logits (B, C).
    """

    foreign: ClassVar[bool] = True
    package: ClassVar[str]

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.network = self.built_network()

    def built_network(self) -> nn.Module:
        """Return the network that the package builds from the spec, with random weights, in evaluation mode."""
        raise NotImplementedError

    def logits_of(self, network: nn.Module, images: Tensor) -> Tensor:
        """Return the logits of images, or the features without a classifier, by ``network``, one of the package."""
        logits: Tensor = network(images)
        return logits

    def logits_and_features(self, images: Tensor) -> tuple[Tensor | None, Tensor | None]:
        return self.logits_of(self.network, images), None

    @property
    def title(self) -> str:
        return f"{self.package} model {self.spec.description}"

    def answer_calls(self, masked: Mapping[str, Placement] | None = None) -> None:
        """Replace the fused attention function in each module that calls it once; the exporter decomposes other calls.

        masked: path of an attention → the grid of its tokens, for the attentions with the mask of the spec.
        Errors: SpecError when a call masks the future, when heads of Q share K and V, or when the network does not take
        images of the spec.
        """
        for call in self._answerable_calls():
            bias = None if call.bias is None else PassedBias(self, input_shape(self.spec))
            attention = self.network.get_submodule(call.module)
            if masked is not None and call.module in masked:
                answer_fused_call(attention, MASK, MaskedAttention(masked[call.module], self.spec.mask, bias))
                continue
            before: dict[str, Step | None] = {"scale": Scale(call.scale), "bias": bias}
            answer = AnsweredAttention(AttentionScores(before), windows=call.windows)
            answer_fused_call(attention, ATTENTION, answer)

    def _answerable_calls(self) -> list[FusedCall]:
        """Return the calls by modules that make one call; none if the network cannot run on tensors without data."""
        try:
            # The network may keep tensors that its first run makes; under torch.device("meta") they would have no data.
            with torch.device("cpu"):
                return single_calls(self.network, input_shape(self.spec))
        except GmmvitError:
            raise
        # The network is code of another package, which raises exceptions of any class.
        except Exception:
            self._require_run()
            return []

    @torch.no_grad()
    def _require_run(self) -> None:
        """Errors: SpecError when the network does not take an image."""
        if any(parameter.is_meta for parameter in self.network.parameters()):
            return
        try:
            self.network(torch.zeros(1, *input_shape(self.spec)))
        # The arguments come from a file or from the user; many wrong sizes show only when the network runs.
        except Exception as exc:
            height, width = self.spec.image_shape
            raise SpecError(
                f"{self.title} does not take images of {height} × {width} pixels: {type(exc).__name__}: {exc}",
                hint=self.spec.misfit_hint,
            ) from exc

    def observed_grids(self) -> TokenGrids:
        """Run the package's own network without data: in this network, the fused attention function is still called."""
        with torch.device("meta"):
            network = self.built_network()
        try:
            return token_grids(network, input_shape(self.spec), only_this_shape=True)
        # The network is code of another package, which raises exceptions of any class.
        except Exception as exc:
            return unknown_grids(network, f"the network cannot run without data: {type(exc).__name__}")

    def computes_built_network(self) -> bool:
        """Return True if the logits are those of the network that the package builds, without a mask of ours."""
        return self.spec.mask.kind == "plain"


def answered_blocks(model: AnsweredNetwork) -> tuple[str, ...]:
    """Return the names of the blocks, the modules that hold an answered attention, in the order of registration."""
    names: list[str] = []
    for path, module in model.named_modules():
        if isinstance(module, AnsweredAttention):
            block = path.rpartition(".")[0].rpartition(".")[0]
            if block not in names and block not in ("", "network"):
                names.append(block)
    return tuple(names)


@torch.no_grad()
def require_equal_logits(model: AnsweredNetwork, *, hint: str) -> None:
    """Check the shape of the logits (or features) of two random images, and, for a model without masks and heads of
    ours, that the float64 logits equal those of the unchanged network of the package with the same weights.

    hint: what to do if the shape is another.  Errors: SpecError when the shape or the logits differ.
    """
    spec = model.spec
    images = torch.randn(2, *input_shape(spec), generator=torch.Generator().manual_seed(0))
    if model.computes_built_network():
        exact = images.double()
        logits = copy.deepcopy(model).double()(exact)
    else:
        exact, logits = None, model(images)
    shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    expected_shape = (2, spec.classes or (shape[1] if len(shape) == 2 else "D"))
    if shape != expected_shape:
        what = "logits" if spec.classes else "features"
        raise SpecError(
            f"{model.title}: expected {what} of shape {expected_shape} for two images, got {shape}", hint=hint
        )
    if exact is None:
        return
    plain = model.built_network()
    plain.load_state_dict(
        {name.removeprefix("network."): tensor for name, tensor in model.state_dict().items()}, strict=True
    )
    expected = model.logits_of(plain.double(), exact)
    if not bool(expected.isfinite().all()):
        return  # `checkpoints.audit` reports weights that are NaN or infinite
    largest, scale = float((logits - expected).abs().max()), float(expected.abs().max())
    if not largest <= _ROUNDING * max(scale, 1.0):
        raise SpecError(
            f"{model.title}: the logits differ by {largest:.3g} from the logits of {model.package}'s own model; "
            "this is a defect of gmmvit-deploy, please report it with the name of the architecture"
        )
