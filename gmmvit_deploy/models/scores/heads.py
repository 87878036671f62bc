"""Steps that combine heads, or treat each head as a channel: head mixing, its bias, and two normalisations."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gmmvit_deploy.inference.precision import Role
from gmmvit_deploy.models.scores.attention import attention_scores
from gmmvit_deploy.models.scores.step import Operation, Step


class HeadMixing(Step):
    """Head mixing: S'[g] = Σ_h S[h] · weight[h, g], computed as a single matrix product.

    weight: (H, H), indexed [old head, new head].
    """

    operation: Operation = "mix"
    role: Role = "mixing"
    is_constant: bool = True

    def __init__(self, weight: Float[Tensor, "heads heads"]) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def transpose(self) -> None:
        """Exchange old and new heads, as a mistake."""
        self.weight.data = self.weight.detach().t().contiguous()

    def matrix(self) -> Float[Tensor, "heads heads"]:
        return self.weight

    def forward(self, scores: Float[Tensor, "batch heads i j"]) -> Float[Tensor, "batch heads i j"]:
        return (self.weight.transpose(0, 1) @ scores.flatten(2)).reshape(scores.shape)

    def after_factor(self, factor: Tensor) -> Step:
        """Multiply row h of the weight W by f[h]: Σ_h f[h] · S[h] · W[h, g]  =  Σ_h S[h] · (f[h] · W[h, g])."""
        per_row = factor if factor.dim() == 0 else factor.reshape(-1, 1)
        return HeadMixing(self.weight.detach() * per_row).requires_grad_(False)


def transpose_mixings(model: nn.Module, *sides: str) -> bool:
    """Make a mistake: transpose the head mixings on the sides ``before`` and ``after`` of softmax, or on one."""
    mixings = [
        step
        for _, scores in attention_scores(model)
        for name, step in scores.steps()
        if isinstance(step, HeadMixing) and name.partition(".")[0] in sides
    ]
    for mixing in mixings:
        mixing.transpose()
    return bool(mixings)


class HeadBias(Step):
    """A bias (H) of each head, S'[g] = S[g] + bias[g]: that of the 1×1 convolution that mixes heads in DeepViT."""

    operation: Operation = "add"
    role: Role = "mixing"
    is_constant: bool = True

    def __init__(self, bias: Float[Tensor, " heads"]) -> None:
        super().__init__()
        self.bias = nn.Parameter(bias)

    def matrix(self) -> Float[Tensor, "heads 1 1"]:
        return self.bias[:, None, None]

    def forward(self, scores: Float[Tensor, "batch heads i j"]) -> Float[Tensor, "batch heads i j"]:
        return scores + self.matrix()

    def mistakes(self) -> Iterator[tuple[str, Step | None]]:
        yield "no bias after the head mixing", None


class HeadBatchNorm(Step):
    """BatchNorm with a channel for each head, in evaluation mode: S'[g] = γ_g · (S[g] − μ_g) / √(σ²_g + ε) + β_g.

    weight, bias: (H), γ and β.  running_mean, running_var: (H), buffers, the stored statistics μ and σ².
    tokens: N; the statistics of a new step are those of weights near 1/N.
    Source: Re-attention of DeepViT.
    """

    operation: Operation = "normalise"
    role: Role = "norm"
    is_constant: bool = True
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, heads: int, *, tokens: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads))
        self.bias = nn.Parameter(torch.zeros(heads))
        self.register_buffer("running_mean", torch.full((heads,), 1 / tokens))
        self.register_buffer("running_var", torch.full((heads,), tokens**-2.0))
        self.eps = eps

    def matrix(self) -> Float[Tensor, "2 heads"]:
        """Return the factor γ/√(σ² + ε) and the offset β − μ·γ/√(σ² + ε) of each head, stacked."""
        factor = self.weight / (self.running_var + self.eps).sqrt()
        return torch.stack([factor, self.bias - self.running_mean * factor])

    def forward(self, scores: Float[Tensor, "batch heads i j"]) -> Float[Tensor, "batch heads i j"]:
        return nn.functional.batch_norm(
            scores, self.running_mean, self.running_var, self.weight, self.bias, training=False, eps=self.eps
        )

    def mistakes(self) -> Iterator[tuple[str, Step | None]]:
        yield "no BatchNorm over the heads", None
        for eps in (1e-3, 1e-6):
            other = HeadBatchNorm(len(self.weight), tokens=1, eps=eps)
            other.load_state_dict(self.state_dict())
            yield f"BatchNorm over the heads with an epsilon of {eps:g}", other


class HeadNorm(Step):
    """Normalisation of the H scores of each pair of tokens: S'[:, i, j] = LayerNorm(S[:, i, j]).

    Source: Re-attention of vit-pytorch.
    """

    operation: Operation = "normalise"
    role: Role = "norm"
    is_constant: bool = True

    def __init__(self, weight: Float[Tensor, " heads"], bias: Float[Tensor, " heads"], *, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(bias)
        self.eps = eps

    def matrix(self) -> Float[Tensor, "2 heads"]:
        return torch.stack([self.weight, self.bias])

    def forward(self, scores: Float[Tensor, "batch heads i j"]) -> Float[Tensor, "batch heads i j"]:
        last = scores.movedim(-3, -1)
        normed = nn.functional.layer_norm(last, self.weight.shape, self.weight, self.bias, self.eps)
        return normed.movedim(-1, -3)

    def mistakes(self) -> Iterator[tuple[str, Step | None]]:
        yield "no normalisation over the heads", None
        yield "the normalisation over the keys in place of the heads", _KeyNorm(self)


class _KeyNorm(HeadNorm):
    def __init__(self, like: HeadNorm) -> None:
        super().__init__(like.weight.detach(), like.bias.detach(), eps=like.eps)

    def forward(self, scores: Float[Tensor, "batch heads i j"]) -> Float[Tensor, "batch heads i j"]:
        normed = nn.functional.layer_norm(scores, scores.shape[-1:], eps=self.eps)
        return normed * self.weight[:, None, None] + self.bias[:, None, None]


class CentredHeadNorm(Step):
    """The folded form of `HeadNorm` for scores whose mean over the heads is 0 at each pair of tokens.

    S'[h, i, j] = weight[h] · S[h, i, j] / √(mean_g S[g, i, j]² + ε) + bias[h]

    weight, bias: (H), or None after folding has moved both to the values V.
    """

    operation: Operation = "normalise"
    role: Role = "norm"
    is_constant: bool = True
    weight: Tensor | None
    bias: Tensor | None

    def __init__(self, like: HeadNorm) -> None:
        super().__init__()
        self.eps = like.eps
        self.heads = len(like.weight)
        self.register_buffer("weight", like.weight.detach().clone())
        self.register_buffer("bias", like.bias.detach().clone())

    def without_affine(self) -> CentredHeadNorm:
        bare = copy.copy(self)
        bare._buffers = {"weight": None, "bias": None}
        return bare

    def matrix(self) -> Float[Tensor, "2 heads"]:
        """Return the weight and the bias, stacked; ones and zeros if folding has moved both to V."""
        if self.weight is None or self.bias is None:
            return torch.stack([torch.ones(self.heads), torch.zeros(self.heads)])
        return torch.stack([self.weight, self.bias])

    def forward(self, scores: Float[Tensor, "batch heads i j"]) -> Float[Tensor, "batch heads i j"]:
        normed = scores / (scores.square().mean(dim=-3, keepdim=True) + self.eps).sqrt()
        if self.weight is None or self.bias is None:
            return normed
        return normed * self.weight[:, None, None] + self.bias[:, None, None]
