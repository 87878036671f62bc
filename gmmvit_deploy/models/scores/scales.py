"""Steps that multiply all scores, or all scores of a head, by a number."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gmmvit_deploy.inference.precision import Role
from gmmvit_deploy.models.scores.step import Multiply, Step


class Scale(Multiply):
    """A constant scale, such as d^(−1/2), in float64 until the multiplication: S' = factor · S."""

    role: Role = "scale"
    is_constant: bool = True

    def __init__(self, factor: float, *, scales_query: bool = False) -> None:
        super().__init__()
        self.factor = factor
        self.scales_query = scales_query

    def matrix(self) -> Float[Tensor, ""]:
        return torch.tensor(self.factor, dtype=torch.float64)

    def forward(self, scores: Tensor) -> Tensor:
        return scores * self.factor

    def for_windows(self, windows: int, heads: int) -> Step:
        return self

    def mistakes(self) -> Iterator[tuple[str, Step | None]]:
        yield "1/√d missing", None
        yield "1/√d applied twice", Scale(self.factor**2, scales_query=self.scales_query)


class LearnedTemperature(Multiply):
    """A trained scale of each head: S'[h] = t[h] · S[h].

    temperature: t, or the logarithm of t if ``is_logarithm`` is True; (H), or a scalar for all heads. The exponential
    of a logarithm is computed in float64 and rounded once to the type of the parameter.
    usual: the scale of the same network without a learned temperature, such as d^(−1/2); None if it is not known.
    Source: locality self-attention (LSA), where training starts with t = d^(−1/2) and d is the head dim.
    """

    role: Role = "scale"

    def __init__(
        self,
        temperature: Float[Tensor, "*heads"],
        *,
        is_logarithm: bool = False,
        scales_query: bool = False,
        usual: float | None = None,
    ) -> None:
        super().__init__()
        self.usual = usual
        self.temperature = nn.Parameter(temperature)
        self.is_logarithm = is_logarithm
        self.scales_query = scales_query

    def matrix(self) -> Tensor:
        factor: Tensor = self.temperature
        if self.is_logarithm:
            factor = factor.double().exp().to(factor.dtype)
        return factor if factor.dim() == 0 else factor[:, None, None]

    def mistakes(self) -> Iterator[tuple[str, Step | None]]:
        yield "the learned temperature missing", None
        other = LearnedTemperature(
            self.temperature.detach(), is_logarithm=not self.is_logarithm, scales_query=self.scales_query
        )
        yield (
            "the temperature's logarithm in place of the temperature"
            if self.is_logarithm
            else "the temperature taken for its logarithm",
            other,
        )
        usual = self if self.usual is None else Scale(self.usual, scales_query=self.scales_query)
        yield "1/√d in place of the learned temperature", usual
        factor = self.matrix().detach()
        divided = LearnedTemperature(1 / factor.flatten(), scales_query=self.scales_query)
        yield "the scores divided by the learned temperature", self if bool((factor == 0).any()) else divided
