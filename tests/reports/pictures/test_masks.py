"""Masks, steps, patch filters and position embeddings in numbers and pictures, on values that are known."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.models.families import model_from_spec
from gmmvit_deploy.models.families.family import Windows
from gmmvit_deploy.models.families.vit import ViTSpec
from gmmvit_deploy.models.layers.embeddings import patch_filters
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.layers.patches import VIEWS, PatchEmbedding, ShiftedPatches
from gmmvit_deploy.models.scores.attention import AttentionScores, attention_scores
from gmmvit_deploy.models.scores.biases import ManhattanDecay, PrefixBias, shift_mask
from gmmvit_deploy.models.scores.masks import ElementwiseMask, GaussianMixtureMask
from gmmvit_deploy.models.scores.scales import LearnedTemperature
from gmmvit_deploy.models.specs import MaskSpec
from gmmvit_deploy.reports.pictures._embedding_numbers import similarities_of
from gmmvit_deploy.reports.pictures.drawings import similarity_image, step_maps_image
from gmmvit_deploy.reports.pictures.mask_images import matrix_image, position_maps_image, sheet, token_map
from gmmvit_deploy.reports.pictures.mask_numbers import masks_of
from gmmvit_deploy.reports.pictures.mask_report import write_report
from gmmvit_deploy.reports.pictures.step_numbers import HeadValues, steps_of
from tests.browser import accessibility_problems
from tests.golden_files import EACH_FAMILY, MANIFEST, golden, loaded
from tests.pages import require_readable_page

GRID = 4


def model_with(weight: torch.Tensor) -> Model:
    """One block, one ELM mask."""
    spec = ViTSpec(
        image_size=GRID,
        patch_size=1,
        classes=2,
        dim=4,
        depth=1,
        heads=2,
        head_dim=2,
        mlp_dim=4,
        class_token=False,
        mask=MaskSpec(kind="elm"),
    )
    model = model_from_spec(spec).eval()
    model.blocks[0].attention.scores.before.mask = ElementwiseMask(weight)
    return model


def test_a_mask_of_the_token_itself_is_as_local_as_can_be() -> None:
    (layer,) = masks_of(model_with(torch.eye(GRID**2)))
    (head,) = layer.heads
    assert head.within == (1.0, 1.0, 1.0)
    assert head.itself == pytest.approx(GRID**2)
    assert head.negative == 0
    assert (head.smallest, head.largest) == (0, 1)


def test_dead_kernels_are_named_by_head() -> None:
    model = model_with(torch.eye(GRID**2))
    alpha, sigma = torch.ones(3, 2, 1, 1), torch.ones(3, 2, 1, 1)
    alpha[1, 0] = 0
    model.blocks[0].attention.scores.before.mask = GaussianMixtureMask(alpha, sigma, GRID)
    (layer,) = masks_of(model)
    assert [head.dead for head in layer.heads] == [(1,), ()]
    assert layer.heads[0].alpha == (1, 0, 1)


def test_the_report_marks_the_mask_without_influence(tmp_path: Path) -> None:
    shown = write_report(loaded("pit_gmm"), tmp_path / "masks.html")["masks"]
    assert [layer["layer"] for layer in shown if layer["dead"]] == ["stages.2.0.attention"]
    page = (tmp_path / "masks.html").read_text()
    mark = "<p>The mask of this layer has no influence on the logits: after this attention the network reads only"
    assert page.count(mark) == 1
    assert page.index("<h2>stages.2.0.attention</h2>") < page.index(mark)
    write_report(loaded("vit_gmm"), tmp_path / "other.html")
    assert mark not in (tmp_path / "other.html").read_text()
    layers = masks_of(loaded("pit_gmm").model)
    plain, marked = sheet(layers, title=""), sheet([replace(layer, dead=True) for layer in layers], title="")
    assert marked.size == plain.size
    assert marked.tobytes() != plain.tobytes()


def test_position_maps_put_row_i_at_the_place_of_token_i() -> None:
    weight = torch.zeros(GRID**2, GRID**2)
    weight[6, 11] = 1  # token (1, 2) looks at token (2, 3)
    (layer,) = masks_of(model_with(weight))
    picture = np.asarray(position_maps_image(layer, 0)).astype(int)
    coloured_at = [tuple(at) for at in np.argwhere(picture[..., 0] < 100)]
    assert coloured_at == [(1 * (GRID + 1) + 2, 2 * (GRID + 1) + 3)]
    assert np.asarray(matrix_image(layer, 0))[6, 11].tolist() == picture[coloured_at[0]].tolist()


@pytest.mark.parametrize("shift", [0, 2])
def test_map_within_windows_is_what_the_attention_lets_through(shift: int) -> None:
    """Compare with the model's own steps: roll, divide into windows, mask tokens that only the roll put together."""
    grid, window = 8, 4
    side = grid // window
    (masks,) = masks_of(model_with(torch.arange(window**4).reshape(window**2, -1).float()))
    windows = Windows(grid=grid, window=window, shift=shift)
    outside = shift_mask(grid, window, shift).numpy() if shift else np.zeros((side**2, window**2, window**2))
    places = torch.arange(grid**2).reshape(grid, grid).roll((-shift, -shift), dims=(0, 1))
    members = places.reshape(side, window, side, window).transpose(1, 2).reshape(side**2, window**2).numpy()
    for number, tokens in enumerate(members):
        for i, token in enumerate(tokens):
            expected = np.full(grid**2, np.nan, np.float32)
            seen = outside[number, i] == 0
            expected[tokens[seen]] = masks.matrices[0][i][seen]
            row, column = divmod(int(token), grid)
            values = token_map(masks, 0, row=row, column=column, windows=windows)
            assert np.array_equal(values.reshape(-1), expected, equal_nan=True)


def test_a_picture_needs_masks(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no masks to draw") as caught:
        write_report(loaded("mnist_vit"), tmp_path / "masks.png")
    assert {"audit", "sizes", "steps", "memories", "embeddings"} <= set(re.findall(r"\w+", caught.value.hint))


@pytest.mark.first(1)
@pytest.mark.parametrize("name", [name for name in EACH_FAMILY if MANIFEST[name]["mask"] == "gmm"])
def test_reports_of_masks(name: str, tmp_path: Path) -> None:
    write_report(loaded(name), tmp_path / "masks.html")
    page = (tmp_path / "masks.html").read_text()
    require_readable_page(page)
    layers = masks_of(loaded(name).model)
    alts = re.findall(r'alt="([^"]+)"', page)
    assert len(set(alts)) == len(alts)
    assert sum(alt.endswith(": mask matrix") for alt in alts) == sum(len(layer.heads) for layer in layers)
    assert all(f"<h2>{layer.layer}</h2>" in page for layer in layers)
    write_report(loaded(name), tmp_path / "masks.png")
    assert Image.open(tmp_path / "masks.png").size == sheet(layers, title="").size


@pytest.mark.nightly
@pytest.mark.integration
def test_an_accessibility_checker_has_no_complaint(tmp_path: Path) -> None:
    write_report(loaded("vit_gmm"), tmp_path / "masks.html")
    assert accessibility_problems(tmp_path / "masks.html") == []


# ---- steps, patch filters and position embeddings --------------------------------------------------------------------


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
    assert step.measured(1) == {"smallest": -0.75, "largest": 0.0, "closed": 0}


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
