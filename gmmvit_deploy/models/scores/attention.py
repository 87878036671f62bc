"""Compute attention weights as steps before and after softmax.

    weights = after(softmax(before(Q Kᵀ)))

A step is a scale, a mask, a bias, a head mixing or a normalisation over heads (module `step`). In a trained model, the
steps compute their matrices in each forward pass; in a folded model, the matrices are constants.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gmmvit_deploy.inference.precision import Role
from gmmvit_deploy.models.scores.scales import Scale
from gmmvit_deploy.models.scores.step import Step


class AttentionScores(nn.Module):
    """Compute the attention weights after(softmax(before(Q Kᵀ))) from Q and K.

    before, after: name → step, in the order in which the steps are applied; None omits a step. Steps on Q come first.
    The step ``mask`` of ``before`` has the full name ``before.mask``.
    Errors: ValueError when a step on Q follows a step on Q Kᵀ, or follows softmax.
    """

    operator_roles: ClassVar[Mapping[str, Role]] = {"matmul": "product"}

    before: nn.ModuleDict
    after: nn.ModuleDict

    def __init__(self, before: Mapping[str, Step | None], after: Mapping[str, Step | None] | None = None) -> None:
        super().__init__()
        self.before = nn.ModuleDict({name: step for name, step in before.items() if step is not None})
        self.after = nn.ModuleDict({name: step for name, step in (after or {}).items() if step is not None})
        on_query = [step.scales_query for _, step in self.steps_before()]
        if on_query != sorted(on_query, reverse=True) or any(step.scales_query for _, step in self.steps_after()):
            names = ", ".join(name for name, _ in self.steps())
            raise ValueError(
                f"attention steps are out of order: steps that change Q come before steps that change Q Kᵀ; got {names}"
            )

    def forward(
        self, query: Float[Tensor, "*batch heads i d"], key: Float[Tensor, "*batch heads j d"]
    ) -> Float[Tensor, "*batch heads i j"]:
        """Return before(Q Kᵀ), the input of softmax."""
        for _, step in _in(self.before):
            if step.scales_query:
                query = step(query)
        return self.masked(query @ key.transpose(-2, -1))

    def masked(self, products: Float[Tensor, "*batch heads i j"]) -> Float[Tensor, "*batch heads i j"]:
        """Apply the steps before softmax, except steps on Q, to the given matrix products Q Kᵀ."""
        for _, step in _in(self.before):
            if not step.scales_query:
                products = step(products)
        return products

    def weights(
        self, query: Float[Tensor, "*batch heads i d"], key: Float[Tensor, "*batch heads j d"]
    ) -> Float[Tensor, "*batch heads i j"]:
        # Not `forward`: the exporter then counts softmax as an operator of the calling attention.
        return self.normalised(self(query, key))

    def normalised(self, scores: Float[Tensor, "*batch heads i j"]) -> Float[Tensor, "*batch heads i j"]:
        """Apply softmax and the steps after softmax."""
        weights = torch.softmax(scores, dim=-1)
        for _, step in _in(self.after):
            weights = step(weights)
        return weights

    def steps(self) -> Iterator[tuple[str, Step]]:
        """Yield (full name, such as ``before.scale``; step) in the order in which steps are applied."""
        yield from self.steps_before()
        yield from self.steps_after()

    def steps_before(self) -> list[tuple[str, Step]]:
        return [(f"before.{name}", step) for name, step in _in(self.before)]

    def steps_after(self) -> list[tuple[str, Step]]:
        return [(f"after.{name}", step) for name, step in _in(self.after)]

    def put(self, name: str, step: Step | None) -> None:
        """Replace the step with the full name ``name`` at the same position; None removes the step."""
        side, _, key = name.partition(".")
        steps = cast("nn.ModuleDict", getattr(self, side))
        if step is None:
            del steps[key]
        else:
            steps[key] = step


def _in(steps: nn.ModuleDict) -> Iterator[tuple[str, Step]]:
    for name, step in steps.items():
        yield name, cast("Step", step)


def scaled_scores(
    factor: float, *, mask: Step | None = None, bias: Step | None = None, scales_query: bool = False
) -> AttentionScores:
    """Return the scores of the most common attention, softmax(M ∘ (Q Kᵀ · factor) + B).

    factor: usually d^(−1/2), with d the head dim.  scales_query: True multiplies Q by the factor in place of Q Kᵀ.
    """
    return AttentionScores({"scale": Scale(factor, scales_query=scales_query), "mask": mask, "bias": bias})


def attention_scores(model: nn.Module) -> Iterator[tuple[str, AttentionScores]]:
    """Yield (name of the attention, scores of the attention) for every attention of a model of any family."""
    for name, module in model.named_modules():
        if isinstance(module, AttentionScores):
            yield name.removesuffix(".scores"), module
