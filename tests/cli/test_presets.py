"""``gmmvit inspect --preset`` prints the number of parameters that the training code of each preset counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from gmmvit_deploy.models.families import FAMILIES
from tests.cli.terminal import gmmvit_here
from tests.conftest import golden
from tests.models.families.preset_counts import DEEPVIT, RMT

EANET = {
    "T2t_vit_7": 6_096_206,
    "T2t_vit_10": 8_489_678,
    "T2t_vit_12": 10_085_326,
    "T2t_vit_14": 29_801_422,
    "T2t_vit_t_14": 29_801_422,
    "T2t_vit_19": 54_470_798,
    "T2t_vit_t_19": 54_470_798,
    "T2t_vit_24": 89_355_726,
    "T2t_vit_t_24": 89_355_726,
    "T2t_vit_14_resnext": 29_707_510,
    "T2t_vit_14_wide": 34_423_758,
}
COUNTS = {"deepvit": DEEPVIT, "rmt": RMT, "eanet": EANET}
"""Family → preset → trainable parameters with 1000 classes."""
SPT_LSA = {"vit": 2_729_878, "cait": 9_058_066, "pit": 8_642_014, "t2t": 6_507_081, "swin": 8_562_166}
"""Preset → trainable parameters with SPT and LSA, for 32×32 pixels and 10 classes."""


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("family", "preset"), [(family, preset) for family, counts in COUNTS.items() for preset in counts]
)
def test_presets_of_224_pixels(family: str, preset: str) -> None:
    size = "384" if preset.endswith("_384") else "224"
    answer = gmmvit_here("inspect", "--preset", preset, "--classes", "1000", "--image-size", size)
    assert answer.status == 0, answer.err
    rows = dict(row.split(maxsplit=1) for row in answer.out.splitlines() if len(row.split()) > 1)
    assert rows["family"].strip() == family
    assert rows["trainable"].split() == ["parameters", f"{COUNTS[family][preset]:,}"]


@pytest.mark.first(2)
@pytest.mark.parametrize("preset", SPT_LSA)
def test_presets_with_spt_and_lsa(preset: str) -> None:
    sizes = ("--classes", "10", "--image-size", "32")
    answer = gmmvit_here("inspect", "--preset", preset, *sizes, "--spt", "--lsa")
    assert answer.status == 0, answer.err
    assert f"{SPT_LSA[preset]:,}" in answer.out


def test_every_preset_is_in_the_tables() -> None:
    presets = {family.name: set(family.presets) for family in FAMILIES}
    assert {name: set(counts) for name, counts in COUNTS.items()} == {name: presets[name] for name in COUNTS}
    others = {family.name for family in FAMILIES if "spt-lsa" in family.variants()}
    assert set(SPT_LSA) == others


@pytest.mark.parametrize(
    "option",
    [("--classes", "10"), ("--mask", "gmm"), ("--kernels", "5"), ("--shared",), ("--spt",), ("--lsa",)],
    ids=lambda option: option[0],
)
@pytest.mark.parametrize("image", [False, True], ids=["checkpoint", "image"])
def test_inspect_refuses_options_of_presets(option: tuple[str, ...], image: bool, tmp_path: Path) -> None:
    """Without this error, the command would ignore the option."""
    photo = tmp_path / "photo.png"
    photo.touch()
    refused = gmmvit_here("inspect", golden("vit_gmm").path, *option, *(("--image", photo) if image else ()))
    assert refused.status == 1
    expected = "--image draws the attention of a bundle" if image else f"{option[0]}: describes the model of a preset"
    assert expected in refused.err
