"""The hint of an error names options that mend the command, for checkpoints of every code."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.images.resize_rules import RESIZE_RULES
from gmmvit_deploy.images.spec import ImageSpec
from gmmvit_deploy.models.families import FAMILIES
from tests.cli.terminal import gmmvit_here, refused
from tests.conftest import golden

RMT = ("--image-size", "64", "--set", "decomposed_stages=1,2,3")
SCALES = ("--set", "scale_adjustment=0.5", "--set", "transform_scale=yes")


def wrong(*arguments: str | Path) -> tuple[str, str]:
    """Return (message, hint) of a command that ends with an error."""
    return refused(gmmvit_here(*arguments, columns=1000))


@pytest.mark.parametrize(
    ("name", "options"),
    [("rmt_2023", RMT), ("deepvit_cnn_scaled", SCALES), ("vp_vit", ("--set", "heads=4")), ("eanet_transfer", ())],
)
def test_export_asks_for_the_resize_rule(name: str, options: tuple[str, ...], tmp_path: Path) -> None:
    """The help of --resize names the families that need no rule, and the page of the family mentions the option."""
    stated = ("--mean", "0.5,0.5,0.5", "--std", "0.5,0.5,0.5")
    message, hint = wrong("export", golden(name).path, "-o", tmp_path / "bundle", *stated, *options)
    assert message.endswith("the checkpoint does not state the resize rule")
    assert hint.startswith("add --resize METHOD; or add --input tensor")
    assert hint.endswith(f"METHOD: {', '.join(RESIZE_RULES)}")
    family = "vit_pytorch" if name == "vp_vit" else name.partition("_")[0]
    page = Path(__file__).parents[2] / "docs" / "pages" / "models" / f"{family}.md"
    assert "`--resize`" in page.read_text()


def test_the_help_names_the_families_with_a_default_resize_rule() -> None:
    stretched = [family.name for family in FAMILIES if family.default_resize is not None]
    text = " ".join(gmmvit_here("export", "--help", columns=1000).out.replace("│", " ").split())
    assert f"otherwise stretch-bilinear for the families {', '.join(stretched[:-1])} or {stretched[-1]}." in text


@pytest.mark.parametrize(
    ("name", "options", "message", "hint"),
    [
        ("spt_swin", "--set heads=7", "--set heads=7, but", "omit --set heads, or type --set heads=2$"),
        (
            "vit_plain",
            "--preset vit --set heads=3",
            "--set heads=3, but the preset has 12",
            "omit --set heads to take the 12 heads of the preset, or omit --preset vit$",
        ),
        ("rmt_2023", "--image-size 64 --preset RMT_S_2023", "preset", ".*omit --preset RMT_S_2023"),
        ("vp_vit", "--preset vit", "", "omit --preset, .* vit_pytorch has no presets;.*type --set heads=N$"),
        ("rmt_2023", f"{' '.join(RMT)} --preset vit", "", "omit --preset, or type a preset of the family rmt: RMT_"),
        # A value of the training is named, and no answer is given to copy.
        ("rmt_2023", "", "", "type --image-size N and --set decomposed_stages=LIST with the values of the training;"),
        ("vp_simple_vit", "--set heads=2", "", "type --image-size N with the values of the training; for example,"),
        ("deepvit_cnn_cleaned", "", "", r"type --set scale_adjustment=NUMBER \(in the presets 1, but 0\.5"),
        (
            "vp_vit",
            "--set heads=4 --set channels=1",
            "expected 1·p·p",
            "omit --set channels, or type --set channels=3, which fits the file$",
        ),
        (
            "vp_vit",
            "--model vit_tiny_patch16_224",
            "",
            "omit --model: the names of the tensors are those of vit-pytorch's ViT$",
        ),
    ],
)
def test_the_hint_names_the_options_that_mend_the_command(name: str, options: str, message: str, hint: str) -> None:
    shown, next_step = wrong("inspect", golden(name).path, *options.split())
    assert message in shown
    assert re.match(hint, next_step), next_step


def test_a_bundle_without_normalisation_names_resize() -> None:
    image = ImageSpec(height=4, width=4, channels=3)
    with pytest.raises(InputError, match="the normalisation of the images is unknown") as caught:
        image.tensor_from_pixels(np.zeros((1, 4, 4, 3), np.uint8))
    assert "--mean and --std; also with --resize if gmmvit export asks" in caught.value.hint
