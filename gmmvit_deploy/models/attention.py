"""Masked attention, as trained and as folded.

    P = softmax(M ∘ (Q Kᵀ · d^(−1/2)) + B) V

`MaskedScores` is the part between Q Kᵀ and softmax, the only part that folding touches; every
family's attention holds one. Trained, it scales, multiplies by a mask and adds a bias, each
computed; folded, M and B are constants and the scale is merged into M.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gmmvit_deploy.models.biases import Bias
from gmmvit_deploy.models.masks import Mask

__all__ = ["MaskedAttention", "MaskedScores", "SeparateProjections", "heads_of", "projected"]


def heads_of(x: Float[Tensor, "*batch n inner"], heads: int) -> Float[Tensor, "*batch heads n d"]:
    """Cut the last dimension into heads and put them before the tokens."""
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads).transpose(-3, -2)


class MaskedScores(nn.Module):
    """Q, K  →  M ∘ (Q Kᵀ · scale) + B.

    scale: None once it is merged into the mask.  mask, bias: None where there is none.
    scales_query: the released code of some families scales Q instead of Q Kᵀ. The formula is the
    same, the last bits of the logits are not, and ours shall be theirs.
    """

    scale: float | None

    def __init__(
        self, *, scale: float, mask: Mask | None, bias: Bias | None = None, scales_query: bool = False
    ) -> None:
        super().__init__()
        self.scale = scale
        self.scales_query = scales_query
        self.mask = mask
        self.bias = bias

    def forward(
        self, query: Float[Tensor, "*batch heads i d"], key: Float[Tensor, "*batch heads j d"]
    ) -> Float[Tensor, "*batch heads i j"]:
        if self.scale is not None and self.scales_query:
            query = query * self.scale
        return self.masked(query @ key.transpose(-2, -1))

    def masked(self, scores: Float[Tensor, "*batch heads i j"]) -> Float[Tensor, "*batch heads i j"]:
        """What follows the product: scale, mask, bias."""
        if self.scale is not None and not self.scales_query:
            scores = scores * self.scale
        if self.mask is not None:
            scores = self.mask(scores)
        return scores if self.bias is None else self.bias(scores)


class SeparateProjections(nn.Module):
    """x → (W_1 x + b_1, W_2 x + b_2, …): what one stacked projection gives, as products of their own."""

    def __init__(self, stacked: nn.Linear, parts: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList()
        biases = [None] * parts if stacked.bias is None else stacked.bias.detach().chunk(parts)
        for weight, bias in zip(stacked.weight.detach().chunk(parts), biases, strict=True):
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None).requires_grad_(False)
            linear.weight.copy_(weight)
            if bias is not None:
                linear.bias.copy_(bias)
            self.parts.append(linear)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(linear(x) for linear in self.parts)


def projected(projection: nn.Module, x: Float[Tensor, "*batch n dim"], parts: int) -> tuple[Tensor, ...]:
    """Q, K and V (or K and V): from one stacked projection, or from `SeparateProjections`."""
    if isinstance(projection, SeparateProjections):
        return projection(x)  # type: ignore[no-any-return]
    return projection(x).chunk(parts, dim=-1)  # type: ignore[no-any-return]


class MaskedAttention(nn.Module):
    """Self-attention whose scores are multiplied by a mask before softmax.

    Q, K and V come stacked in that order from one projection, each (H, d). There is no output
    projection when one head spans the whole model, as in the released code. Swin adds a bias to
    the scores and to the projection, and has its windows as one more dimension of the batch.

    windows: None; or, once folded for engines, how many windows are attended to as if they were heads.
    """

    qkv: nn.Module
    windows: int | None

    def __init__(
        self,
        *,
        dim: int,
        heads: int,
        head_dim: int,
        mask: Mask | None,
        bias: Bias | None = None,
        qkv_bias: bool = False,
        projects_output: bool = True,
        scales_query: bool = False,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.windows = None
        self.qkv = nn.Linear(dim, 3 * heads * head_dim, bias=qkv_bias)
        self.scores = MaskedScores(scale=head_dim**-0.5, mask=mask, bias=bias, scales_query=scales_query)
        self.out = nn.Linear(heads * head_dim, dim) if projects_output else nn.Identity()

    def forward(self, x: Float[Tensor, "*batch n dim"]) -> Float[Tensor, "*batch n dim"]:
        query, key, value = (heads_of(part, self.heads) for part in projected(self.qkv, x, 3))
        if self.windows is not None:
            query, key, value = (part.flatten(1, 2) for part in (query, key, value))
        weights = torch.softmax(self.scores(query, key), dim=-1)
        mixed = weights @ value
        if self.windows is not None:
            mixed = mixed.unflatten(1, (self.windows, self.heads))
        mixed = mixed.transpose(-3, -2).flatten(-2)
        out: Tensor = self.out(mixed)
        return out
