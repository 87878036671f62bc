"""Steps, patch filters and position embeddings in numbers and pictures, on known tensors."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from gmmvit_deploy.models.layers.embeddings import patch_filters
from gmmvit_deploy.models.layers.patches import VIEWS, PatchEmbedding, ShiftedPatches
from gmmvit_deploy.models.scores.attention import AttentionScores, attention_scores
from gmmvit_deploy.models.scores.biases import ManhattanDecay, PrefixBias
from gmmvit_deploy.models.scores.scales import LearnedTemperature
from gmmvit_deploy.reports.pictures._embedding_numbers import similarities_of
from gmmvit_deploy.reports.pictures.drawings import (
    similarity_image,
    step_maps_image,
)
from gmmvit_deploy.reports.pictures.step_numbers import HeadValues, steps_of
from tests.golden_files import golden, loaded


def of_scores(**steps: torch.nn.Module) -> nn.Module:
    """A network with an attention that has these steps before softmax."""
    return nn.ModuleDict({"attention": AttentionScores(steps)})


def test_a_decay_behind_a_class_token_has_maps_of_the_patches() -> None:
    decay = ManhattanDecay(torch.tensor([-0.5, -0.25]), (2, 3))
    (step,) = steps_of(of_scores(decay=PrefixBias(decay, 1))).drawn
    assert (step.grid, step.prefix, step.matrices.shape) == ((2, 3), 1, (2, 7, 7))
    maps = step_maps_image(step, 0)
    assert maps is not None
    assert maps.size == (3 * 4 - 1, 2 * 3 - 1)
    assert step.measured(1) == {"label": "head 1", "smallest": -0.75, "largest": 0.0, "closed": 0}


def test_temperatures_are_numbers_of_each_head() -> None:
    (values,) = steps_of(of_scores(temperature=LearnedTemperature(torch.tensor([0.5, 0.25])))).values
    assert values.values == {"factor": (0.5, 0.25)}
    (logarithm,) = steps_of(of_scores(temperature=LearnedTemperature(torch.tensor(0.0), is_logarithm=True))).values
    assert logarithm.values == {"factor": (1.0,)}
    model = loaded("sl_vit").model
    listed: dict[str, HeadValues] = {
        attention: step
        for step in steps_of(model).values
        if step.name == "before.temperature"
        for attention in step.attentions
    }
    for attention, scores in attention_scores(model):
        expected = scores.before.temperature.matrix().flatten().tolist()
        assert list(listed[attention].values["factor"]) == expected


@pytest.mark.parametrize("kind", [PatchEmbedding, ShiftedPatches], ids=["linear", "shifted"])
def test_filters_of_a_linear_layer_are_those_of_a_convolution(kind: type[PatchEmbedding]) -> None:
    torch.manual_seed(0)
    embedding = kind(4, 6, channels=3).double()
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    read = images
    if isinstance(embedding, ShiftedPatches):
        read = embedding.views(images)
        embedding.norm = nn.Identity()  # the filters are the weights of the linear layer, without the norm
    convolved = nn.functional.conv2d(read, embedding.filters(), embedding.project.bias, stride=4)
    torch.testing.assert_close(convolved.flatten(2).transpose(1, 2), embedding(images))
    assert embedding.filters().shape[1] == 3 * embedding.view_count


@pytest.mark.parametrize(("name", "views"), [("t2t_plain", 1), ("sl_t2t", VIEWS), ("eanet_transfer", 1)])
def test_filters_of_overlapping_patches_are_those_of_a_convolution(name: str, views: int) -> None:
    model = copy.deepcopy(loaded(name).model).double()
    images = torch.from_numpy(golden(name).inputs[:2]).double()
    unfold, transformer = model.unfolds[0], model.token_transformers[0]
    embedding = patch_filters(model)
    assert embedding is not None
    layer = transformer.qkv if name != "eanet_transfer" else transformer.project
    assert (model.get_submodule(embedding.name), embedding.views) == (layer, views)
    read = images if views == 1 else model.views(images)
    expected = layer(unfold(read))  # without the norm in front of the layer
    convolved = nn.functional.conv2d(read, embedding.filters, layer.bias, stride=unfold.stride, padding=unfold.padding)
    torch.testing.assert_close(convolved.flatten(2).transpose(1, 2), expected)


def test_similarities_are_cosines_of_the_positions() -> None:
    model = loaded("pit_gmm").model
    (shown,) = similarities_of(model)
    positions = model.position_embedding.detach()[0].double()
    assert (shown.name, shown.prefix, shown.grid) == ("position_embedding", 1, (16, 16))
    expected = nn.functional.cosine_similarity(positions[:, None], positions[None, 1:], dim=-1)
    np.testing.assert_allclose(np.concatenate([shown.to_prefix, shown.similarity]), expected.numpy(), atol=1e-6)
    np.testing.assert_allclose(np.diagonal(shown.similarity), 1, atol=1e-6)
    measured = shown.measured()
    off = expected[1:][~torch.eye(256, dtype=torch.bool)]
    assert measured["mean"] == pytest.approx(float(off.mean()), abs=1e-6)
    assert measured["smallest"] == pytest.approx(float(off.min()), abs=1e-6)
    image = similarity_image(shown)
    assert image is not None
    assert image.size == (16 * 17 - 1, 16 * 17 - 1)
    # each patch is most similar to itself: full blue at its own place in its own map
    assert np.asarray(image)[17 * 2 + 2, 17 * 3 + 3].tolist() == [8, 64, 129]
