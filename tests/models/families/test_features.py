"""Features of every family: the values that the classifier head reads, also after folding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gmmvit_deploy.models.families import FAMILIES
from gmmvit_deploy.models.folding.fold import fold
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.specs import input_shape
from tests.models.families.small_specs import small_specs, variants

FAMILY_SPECS = {
    f"{family.name}-{kind}": (family, spec)
    for family in FAMILIES
    if family.name not in ("custom", "timm")  # other packages build these networks
    for kind, spec in {**small_specs(family), **variants(family)}.items()
}


def read_by_the_head(model: Model, images: torch.Tensor) -> torch.Tensor:
    """Return the input of the model's last linear layer."""
    caught: list[torch.Tensor] = []
    _, head = next(iter(model.classifier_heads()))
    handle = head.register_forward_pre_hook(lambda _, arguments: caught.append(arguments[0]))
    model(images)
    handle.remove()
    return caught[0]


@pytest.mark.parametrize("case", FAMILY_SPECS, ids=str)
@torch.no_grad()
def test_features_are_what_the_head_reads_and_folding_keeps_them(case: str) -> None:
    family, spec = FAMILY_SPECS[case]
    model = family.build(spec).eval().double()
    images = torch.randn(2, *input_shape(spec), dtype=torch.float64)
    logits = model(images)
    model.outputs = ("logits", "features")
    answers = model.answers(images)
    assert answers[0].equal(logits)
    assert answers[1].equal(read_by_the_head(model, images))
    folded = fold(model.float()).model
    assert folded.outputs == ("logits", "features")
    torch.testing.assert_close(folded.answers(images.float())[1].double(), answers[1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", [case for case in FAMILY_SPECS if "hugging_face" not in case], ids=str)
@torch.no_grad()
def test_the_stated_pooling(case: str) -> None:
    """Hold the words to what happens when the tokens behind the last block are changed, or exchanged."""
    family, spec = FAMILY_SPECS[case]
    model = family.build(spec).eval().double()
    model.outputs = ("features",)
    images = torch.randn(1, *input_shape(spec), dtype=torch.float64)
    features = model(images)

    def with_tokens(change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        last = model.get_submodule(family.blocks(spec)[-1])
        handle = last.register_forward_hook(lambda _, __, tokens: change(tokens))
        answer: torch.Tensor = model(images)
        handle.remove()
        return answer

    width = torch.linspace(0, 1, features.shape[-1], dtype=torch.float64)  # a norm ignores an equal number for all
    assert not with_tokens(lambda tokens: torch.cat([tokens[:, :1] + width, tokens[:, 1:]], 1)).allclose(features)
    if model.pooling == "class token":
        others = with_tokens(lambda tokens: torch.cat([tokens[:, :1], tokens[:, 1:] + width], 1))
        assert others.equal(features)
    else:
        assert model.pooling == "mean of all tokens"
        torch.testing.assert_close(with_tokens(lambda tokens: tokens.flip(1)), features, rtol=0, atol=1e-9)
