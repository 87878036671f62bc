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
from gmmvit_deploy.errors import InputError, OutputError
from gmmvit_deploy.models.families import model_from_spec
from gmmvit_deploy.models.families.vit.spec import ViTSpec
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.scores.masks import ElementwiseMask, GaussianMixtureMask, stored_base
from gmmvit_deploy.models.specs import MaskSpec
from gmmvit_deploy.reports.pictures.mask_images import matrix_image, position_maps_image, sheet
from gmmvit_deploy.reports.pictures.mask_numbers import masks_of
from gmmvit_deploy.reports.pictures.mask_report import page_of, write_report
from tests.browser import accessibility_problems
from tests.conftest import EACH_FAMILY, GOLDEN, golden
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
    model.blocks[0].attention.scores.before.mask = GaussianMixtureMask(alpha, sigma, stored_base(GRID))
    (layer,) = masks_of(model)
    assert [head.dead for head in layer.heads] == [(1,), ()]
    assert layer.heads[0].alpha == (1, 0, 1)


def test_underflow_is_counted() -> None:
    layers = masks_of(load_checkpoint(GOLDEN / "vit_gmm_256_tokens.pth").model)
    assert [layer.underflowed for layer in layers] == [21792, 21792]


def test_the_report_marks_the_mask_without_influence(tmp_path: Path) -> None:
    loaded = load_checkpoint(GOLDEN / "pit_gmm.pth")
    layers = write_report(loaded, tmp_path / "masks.html")
    assert [layer.layer for layer in layers if layer.dead] == ["stages.2.0.attention"]
    assert [layer.to_json()["dead"] for layer in layers] == [False, False, False, True]
    page = (tmp_path / "masks.html").read_text()
    mark = "<p>The mask of this layer has no influence on the logits: after this attention the network reads only"
    assert page.count(mark) == 1
    assert page.index("<h2>stages.2.0.attention</h2>") < page.index(mark)
    write_report(load_checkpoint(GOLDEN / "vit_gmm.pth"), tmp_path / "other.html")
    assert mark not in (tmp_path / "other.html").read_text()
    marked, plain = sheet(layers, title=""), sheet([replace(layer, dead=False) for layer in layers], title="")
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


@pytest.mark.first(1)
@pytest.mark.parametrize("name", EACH_FAMILY)
def test_reports_of_a_golden_checkpoint_of_each_family(name: str, tmp_path: Path) -> None:
    case = golden(name)
    loaded = load_checkpoint(case.path, case.hints)
    write_report(loaded, tmp_path / "masks.html")
    page = (tmp_path / "masks.html").read_text()
    require_readable_page(page)
    layers = masks_of(loaded.model)
    alts = re.findall(r'alt="([^"]+)"', page)
    assert len(set(alts)) == len(alts)
    assert sum(alt.endswith(": mask matrix") for alt in alts) == sum(len(layer.heads) for layer in layers)
    assert all(f"<h2>{layer.layer}</h2>" in page for layer in layers)
    # self-contained: nothing is fetched
    assert not re.search(r"""(?:src|href)=["'](?!data:)|url\(|@import|<script""", page)
    if layers:
        write_report(loaded, tmp_path / "masks.png")
        assert Image.open(tmp_path / "masks.png").size == sheet(layers, title="").size
    else:
        assert "no mask" in page
        with pytest.raises(InputError, match="no masks to draw") as caught:
            write_report(loaded, tmp_path / "masks.png")
        assert {"audit", "sizes", "steps", "memories", "embeddings"} <= set(re.findall(r"\w+", caught.value.hint))


@pytest.mark.nightly
@pytest.mark.integration
def test_an_accessibility_checker_has_no_complaint(tmp_path: Path) -> None:
    write_report(load_checkpoint(GOLDEN / "vit_gmm.pth"), tmp_path / "masks.html")
    assert accessibility_problems(tmp_path / "masks.html") == []


def test_names_in_the_page_are_escaped(tmp_path: Path) -> None:
    path = tmp_path / "<b>&.pth"
    path.write_bytes((GOLDEN / "vit_gmm.pth").read_bytes())
    loaded = load_checkpoint(path)
    assert "<b>&.pth" not in page_of(loaded, masks_of(loaded.model))


def test_reports_are_not_overwritten_unasked(tmp_path: Path) -> None:
    loaded = load_checkpoint(GOLDEN / "vit_gmm.pth")
    (tmp_path / "masks.png").write_text("mine")
    with pytest.raises(OutputError, match="exists"):
        write_report(loaded, tmp_path / "masks.png")
    assert (tmp_path / "masks.png").read_text() == "mine"
    write_report(loaded, tmp_path / "masks.png", force=True)
    assert [file.name for file in tmp_path.iterdir()] == ["masks.png"]


@pytest.mark.parametrize("path", ["masks.pdf", "masks"])
def test_other_kinds_of_report_are_refused(path: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"suffix \.html \(page\) or \.png"):
        write_report(load_checkpoint(GOLDEN / "vit_gmm.pth"), tmp_path / path)
