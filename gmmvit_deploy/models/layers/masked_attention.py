"""Answer the calls of the fused attention function with masked attention, in a network that trains.

    softmax(M ∘ (Q Kᵀ · scale) + attn_mask) V               masks: gmm, elm
    softmax(Q Kᵀ · scale + D + attn_mask) V                 decay, which is a bias

M has ones, and D has zeros, in the rows and columns of the prefix tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from gmmvit_deploy.errors import SpecError
from gmmvit_deploy.models.layers.fused_call import AnsweredAttention, replace_methods
from gmmvit_deploy.models.layers.token_grids import Placement
from gmmvit_deploy.models.scores.attention import AttentionScores
from gmmvit_deploy.models.scores.biases import ManhattanDecay, PassedBias, PrefixBias, retention_decays
from gmmvit_deploy.models.scores.masks import Mask, PrefixMask, mask_from_spec
from gmmvit_deploy.models.scores.scales import Scale
from gmmvit_deploy.models.scores.step import Add, Step
from gmmvit_deploy.models.specs import MaskSpec

RELEASED_NAMES: Mapping[str, str] = {
    "alpha": "alpha",
    "sigma": "sigma",
    "base": "mask",
    "weight": "mask",
    "decay": "decay",
}
"""Tensor of a step → name of the tensor in a `MaskedAttention`.  All names but ``decay`` are those of the paper
authors' released code."""


class MaskedAttention(AnsweredAttention):
    """Compute masked attention for a call of the fused attention function.

    spec: the mask; not ``plain``.  bias: the step that adds the call's ``attn_mask``; None if the call has none.
    This module holds the tensors of the mask in place of the step, so their names in the state dict are short:

    alpha, sigma: (K, H, 1, 1), or (K, 1, 1, 1) if all heads share the mixture.
    mask: (1, 1, n, n), the stored base of a Gaussian mixture, with n = rows · columns; absent for the closed form.
    mask: (n, n), the parameter of an elementwise learnable mask.
    decay: (H), the logarithm of the decay rate of each head, a buffer.
    """

    def __init__(self, place: Placement, spec: MaskSpec, bias: PassedBias | None) -> None:
        step: Step
        steps: dict[str, Step | None] = {"scale": Scale(place.call.scale)}
        if spec.kind == "decay":
            step = ManhattanDecay(retention_decays(place.heads), place.grid)
            steps["decay"] = _behind_prefix(step, place.prefix)
        else:
            mask = mask_from_spec(spec, heads=place.heads, grid=place.grid)
            if mask is None:
                raise SpecError("expected a mask, got the mask kind plain")
            step = mask
            steps["mask"] = _behind_prefix(mask, place.prefix)
        super().__init__(AttentionScores(steps | {"bias": bias}), windows=place.call.windows)
        self.tokens = place.tokens
        self._take_tensors(step)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout: float = 0.0) -> Tensor:
        """As `AnsweredAttention.forward`.  Errors: SpecError for another number of tokens, or a new ``attn_mask``."""
        if query.shape[-2] != self.tokens or key.shape[-2] != self.tokens:
            raise SpecError(
                f"mask on the attention scores: expected {self.tokens} tokens, got {query.shape[-2]}; the mask is "
                "made for images of one size"
            )
        if bias is not None and "bias" not in self.scores.before:
            raise SpecError("the attention passes an attn_mask, but passed no attn_mask when the mask was added")
        out: Tensor = super().forward(query, key, value, bias, dropout)
        return out

    def _take_tensors(self, step: Step) -> None:
        """Move the trained and the stored tensors of ``step`` to this module, from which ``step`` reads the tensors."""
        taken = []
        for name, parameter in list(step.named_parameters(recurse=False)):
            delattr(step, name)
            self.register_parameter(RELEASED_NAMES[name], parameter)
            taken.append(name)
        stored = set(step.state_dict())
        for name, buffer in list(step.named_buffers(recurse=False)):
            if name in stored:
                delattr(step, name)
                self.register_buffer(RELEASED_NAMES[name], buffer)
                taken.append(name)
        # In a tuple, so that this module does not become a submodule of its own part.
        step.__dict__["_holder"] = (self,)
        replace_methods(step, borrowed_tensors, *taken)


def borrowed_tensors(original: type, *names: str) -> dict[str, Any]:
    """Return properties that read the tensors ``names`` of a step from the `MaskedAttention` that holds the step."""

    def borrowed(name: str) -> property:
        def read(self: nn.Module) -> Tensor:
            (holder,) = self.__dict__["_holder"]
            tensor: Tensor = getattr(holder, RELEASED_NAMES[name])
            return tensor

        return property(read)

    return {name: borrowed(name) for name in names}


def _behind_prefix(step: Mask | Add, prefix: int) -> Step:
    if prefix == 0:
        return step
    return PrefixMask(step, prefix) if isinstance(step, Mask) else PrefixBias(step, prefix)
