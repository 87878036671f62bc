"""Masks in numbers and pictures, on masks whose numbers are known."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.models.families import model_from_spec
from gmmvit_deploy.models.families.family import Windows
from gmmvit_deploy.models.families.vit import ViTSpec
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.scores.biases import shift_mask
from gmmvit_deploy.models.scores.masks import ElementwiseMask, GaussianMixtureMask
from gmmvit_deploy.models.specs import MaskSpec
from gmmvit_deploy.reports.pictures.mask_images import matrix_image, position_maps_image, sheet, token_map
from gmmvit_deploy.reports.pictures.mask_numbers import masks_of
from gmmvit_deploy.reports.pictures.mask_report import write_report
from tests.browser import accessibility_problems
from tests.golden_files import EACH_FAMILY, GOLDEN, MANIFEST, loaded
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


def test_underflow_is_counted() -> None:
    layers = masks_of(loaded("vit_gmm_256_tokens").model)
    assert [layer.underflowed for layer in layers] == [21792, 21792]


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


def test_names_in_the_page_are_escaped(tmp_path: Path) -> None:
    path = tmp_path / "<b>&.pth"
    path.write_bytes((GOLDEN / "vit_gmm.pth").read_bytes())
    write_report(load_checkpoint(path), tmp_path / "masks.html")
    assert "<b>&.pth" not in (tmp_path / "masks.html").read_text()


def test_other_kinds_of_report_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"suffix \.html \(page\) or \.png"):
        write_report(loaded("vit_gmm"), tmp_path / "masks.pdf")
