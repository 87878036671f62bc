from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gmmvit_deploy.bundle.artifacts import open_bundle
from tests.cli.terminal import Gmmvit, done, gmmvit_here, refused
from tests.export.test_channels import SPEC, saved_checkpoint
from tests.inference.test_preprocess import encoded, photo
from tests.inference.test_timm_preprocess import by_timm

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_checkpoint(tmp_path_factory.mktemp("resize") / "model.pth", SPEC)


@pytest.mark.nightly
def test_a_bundle_with_a_crop(gmmvit: Gmmvit, checkpoint: Path, tmp_path: Path) -> None:
    bundle_path = tmp_path / "bundle"
    options = ("--mean", "0.5,0.4,0.3", "--std", "0.2,0.2,0.2", "--labels", "a,b,c,d,e", "--max-batch", "2")
    crop = ("--resize", "center-bicubic", "--crop-pct", "0.9")
    done(gmmvit("export", checkpoint, "-o", bundle_path, *options, *crop))
    image = open_bundle(bundle_path).manifest.image
    assert image.resize_text == "center-bicubic, crop_pct 0.9"
    np.testing.assert_array_equal(
        image.pixels_from_bytes(encoded(photo(50, 31), "PNG")), by_timm(photo(50, 31), image)[0]
    )


@pytest.mark.parametrize(
    ("options", "error", "hint"),
    [
        (
            ("--crop-pct", "0.9"),
            "--crop-pct: expected 1 with the resize rule stretch-bilinear, because this rule does not crop, got 0.9",
            "center-bilinear, shortest-bilinear, squash-bilinear or border-bilinear for a rule that crops",
        ),
        (("--resize", "border-bicubic"), "the resize rule border-bicubic needs the mean of each channel", "--mean"),
    ],
)
def test_what_does_not_fit(options: tuple[str, ...], error: str, hint: str, checkpoint: Path, tmp_path: Path) -> None:
    answer = gmmvit_here("export", checkpoint, "-o", tmp_path / "bundle", "--input", "tensor", *options)
    assert hint in refused(answer, error)[1]
    assert not (tmp_path / "bundle").exists()
