"""Presets: their parameters, and where values come from that no tensor of a checkpoint shows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gmmvit_deploy.checkpoints.loading import load_checkpoint, released_state_dict
from gmmvit_deploy.models.families import model_from_spec, preset_spec
from gmmvit_deploy.models.families.counting import trainable_parameters
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.models.specs import MaskSpec
from tests.cli.terminal import gmmvit_here
from tests.conftest import golden

DEEPVIT = {
    "deepvit_patch16_224_re_attn_16b": 24_426_664,
    "deepvit_patch16_224_re_attn_24b": 36_261_448,
    "deepvit_patch16_224_re_attn_32b": 48_096_232,
    "deepvit_S": 27_312_632,
    "deepvit_L": 58_883_708,
    "deepvit_L_384": 59_043_308,
}
RMT = {
    "RMT_T3": 14_334_216,
    "RMT_S": 26_967_240,
    "RMT_M2": 54_154_896,
    "RMT_L6": 95_464_864,
    "RMT_T": 13_192_200,
    "RMT_S_2023": 25_701_064,
    "RMT_B": 52_689_680,
    "RMT_L": 93_844_512,
    "RMT_S_token_label": 27_480_240,
    "RMT_M2_token_label": 54_667_896,
    "RMT_L6_token_label": 96_105_864,
}
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


@pytest.mark.parametrize(
    ("family", "preset"), [(family, preset) for family, counts in COUNTS.items() for preset in counts]
)
def test_presets_of_224_pixels(family: str, preset: str) -> None:
    size = 384 if preset.endswith("_384") else 224
    spec = preset_spec(preset, classes=1000, image_size=size, mask=MaskSpec())
    assert spec.family == family
    with torch.device("meta"):
        assert trainable_parameters(model_from_spec(spec)) == COUNTS[family][preset]


@pytest.mark.first(2)
@pytest.mark.parametrize("preset", SPT_LSA)
def test_presets_with_spt_and_lsa(preset: str) -> None:
    spec = preset_spec(preset, classes=10, image_size=32, mask=MaskSpec(), spt=True, lsa=True)
    with torch.device("meta"):
        assert trainable_parameters(model_from_spec(spec)) == SPT_LSA[preset]


# Where values come from that no tensor of a checkpoint shows: printed by inspect, and stored in the manifest


RMT_ORIGINS = {"image_size": "--image-size 64", "decomposed_stages": "--set decomposed_stages=1,2,3"}


def test_inspect_prints_where_values_come_from() -> None:
    options = ("--image-size", "64", "--set", "decomposed_stages=1,2,3")
    path = golden("rmt_layerscale").path
    rows = [" ".join(row.split()) for row in gmmvit_here("inspect", path, *options, columns=200).out.splitlines()]
    assert "origin of image size --image-size 64" in rows
    assert "origin of decomposed stages --set decomposed_stages=1,2,3" in rows
    assert json.loads(gmmvit_here("inspect", path, *options, "--json").out)["taken_from"] == RMT_ORIGINS


@pytest.mark.first(2)
@pytest.mark.parametrize(("preset", "heads"), [("vit", 12), ("pit", 2), ("t2t", 4)])
@pytest.mark.parametrize("lsa", [False, True], ids=["plain", "lsa"])
def test_heads_of_a_preset_are_recorded(preset: str, heads: int, lsa: bool, tmp_path: Path) -> None:
    """In the files of LSA, the temperatures show the number of heads."""
    spec = preset_spec(preset, classes=10, image_size=32, mask=MaskSpec(), spt=True, lsa=lsa)
    path = tmp_path / "best.pth"
    torch.save(released_state_dict(model_from_spec(spec)), path)
    hints = LoadHints(preset=preset)
    loaded = load_checkpoint(path, hints)
    assert loaded.spec == spec
    assert loaded.taken_from == ({} if lsa else {"heads": f"--preset {preset}"})
    typed = load_checkpoint(path, replace(hints, heads=heads))
    assert typed.taken_from == {"heads": f"--set heads={heads}"}
