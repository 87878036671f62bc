"""Usual mistakes with the steps on attention scores, made in copies of a model."""

from __future__ import annotations

import copy
from collections.abc import Iterator

from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.scores.attention import attention_scores
from gmmvit_deploy.models.scores.step import Step


def mistaken(model: Model) -> Iterator[tuple[str, Model]]:
    """Yield (description, model with the mistake in all its attentions) for each mistake of the steps."""
    names = dict.fromkeys(
        n for _, scores in attention_scores(model) for _, step in scores.steps() for n, _ in step.mistakes()
    )
    for name in names:
        other = copy.deepcopy(model)
        for _, scores in attention_scores(other):
            for step_name, step in list(scores.steps()):
                changes: dict[str, Step | None] = dict(step.mistakes())
                if name in changes and changes[name] is not step:
                    scores.put(step_name, changes[name])
        yield name, other
