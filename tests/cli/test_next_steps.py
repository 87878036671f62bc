"""The hint of an error names options that mend the command, for checkpoints of every code."""

from __future__ import annotations

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
    stated = ("--mean", "0.5,0.5,0.5", "--std", "0.5,0.5,0.5", "--labels", "a,b")
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
    ("name", "options", "heads"),
    [
        ("spt_swin", (), 2),
        ("rmt_2023", RMT, 1),
        ("deepvit_cnn_scaled", SCALES, 3),
        ("sl_cait", (), 3),
        ("vp_deepvit", ("--set", "pool=cls"), 4),
    ],
)
def test_other_heads_than_the_file_shows(name: str, options: tuple[str, ...], heads: int) -> None:
    message, hint = wrong("inspect", golden(name).path, *options, "--set", "heads=7")
    assert "--set heads=7, but" in message
    assert hint == f"omit --set heads, or type --set heads={heads}"


def test_heads_that_contradict_the_preset() -> None:
    message, hint = wrong("inspect", golden("vit_plain").path, "--preset", "vit", "--set", "heads=3")
    assert "--set heads=3, but the preset has 12" in message
    assert hint == "omit --set heads to take the 12 heads of the preset, or omit --preset vit"


@pytest.mark.parametrize(
    ("name", "options", "preset"),
    [
        ("rmt_2023", ("--image-size", "64"), "RMT_S_2023"),
        ("deepvit_cnn_scaled", (), "deepvit_S"),
        ("sl_cait", (), "cait"),
        ("spt_swin", (), "swin"),
        ("eanet_transfer", (), "T2t_vit_7"),
    ],
)
def test_the_preset_does_not_fit(name: str, options: tuple[str, ...], preset: str) -> None:
    message, hint = wrong("inspect", golden(name).path, *options, "--preset", preset)
    assert "preset" in message
    assert f"omit --preset {preset}" in hint


@pytest.mark.parametrize(
    ("name", "options", "start"),
    [
        ("rmt_2023", (), "type --image-size N and --set decomposed_stages=LIST with the values of the training;"),
        ("vp_simple_vit", ("--set", "heads=2"), "type --image-size N with the values of the training; for example,"),
        ("deepvit_cnn_cleaned", (), "type --set scale_adjustment=NUMBER (in the presets 1, but 0.5"),
    ],
)
def test_a_hint_for_a_value_of_the_training_is_no_answer_to_copy(
    name: str, options: tuple[str, ...], start: str
) -> None:
    _, hint = wrong("inspect", golden(name).path, *options)
    assert hint.startswith(start)


def test_a_preset_for_a_family_without_presets() -> None:
    _, hint = wrong("inspect", golden("vp_vit").path, "--preset", "vit")
    assert hint.startswith("omit --preset, because the family vit_pytorch has no presets;")
    assert hint.endswith("type --set heads=N")
    _, hint = wrong("inspect", golden("rmt_2023").path, *RMT, "--preset", "vit")
    assert hint.startswith("omit --preset, or type a preset of the family rmt: RMT_")


def test_channels_that_do_not_fit_the_patches() -> None:
    message, hint = wrong("inspect", golden("vp_vit").path, "--set", "heads=4", "--set", "channels=1")
    assert "expected 1·p·p" in message
    assert hint == "omit --set channels, or type --set channels=3, which fits the file"


def test_an_architecture_of_timm_for_a_file_of_another_code() -> None:
    _, hint = wrong("inspect", golden("vp_vit").path, "--model", "vit_tiny_patch16_224")
    assert hint == "omit --model: the names of the tensors are those of vit-pytorch's ViT"


def test_a_bundle_without_normalisation_names_resize() -> None:
    image = ImageSpec(height=4, width=4, channels=3)
    with pytest.raises(InputError, match="the normalisation of the images is unknown") as caught:
        image.tensor_from_pixels(np.zeros((1, 4, 4, 3), np.uint8))
    assert "--mean and --std; also with --resize if gmmvit export asks" in caught.value.hint


def test_the_command_without_the_wrong_option() -> None:
    answer = gmmvit_here("inspect", golden("rmt_2023").path, *RMT)
    assert answer.status == 0, answer.err
