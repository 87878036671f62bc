"""Where values come from that no tensor of a checkpoint shows: printed by inspect, and stored in the manifest."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.checkpoints.loading import load_checkpoint, released_state_dict
from gmmvit_deploy.models.families import model_from_spec, preset_spec
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.models.specs import MaskSpec
from tests.cli.terminal import gmmvit_here
from tests.conftest import golden

RMT_ORIGINS = {"image_size": "--image-size 64", "decomposed_stages": "--set decomposed_stages=1,2,3"}


def test_inspect_prints_where_values_come_from() -> None:
    options = ("--image-size", "64", "--set", "decomposed_stages=1,2,3")
    path = golden("rmt_layerscale").path
    rows = [" ".join(row.split()) for row in gmmvit_here("inspect", path, *options, columns=200).out.splitlines()]
    assert "origin of image size --image-size 64" in rows
    assert "origin of decomposed stages --set decomposed_stages=1,2,3" in rows
    assert json.loads(gmmvit_here("inspect", path, *options, "--json").out)["taken_from"] == RMT_ORIGINS


@pytest.mark.rest
def test_the_manifest_states_where_values_come_from(tensor_bundles: dict[str, Bundle]) -> None:
    def stored(name: str) -> object:
        return json.loads((tensor_bundles[name].path / "manifest.json").read_text())["taken_from"]

    assert stored("rmt_layerscale") == RMT_ORIGINS
    assert stored("deepvit_cnn_scaled") == {
        "scale_adjustment": "--set scale_adjustment=0.5",
        "transform_scale": "--set transform_scale=yes",
    }
    assert stored("sl_vit") == {}
    assert tensor_bundles["rmt_layerscale"].manifest.taken_from == RMT_ORIGINS


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
