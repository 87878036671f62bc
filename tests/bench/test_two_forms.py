"""The scripts that compare forms of a system run, and refuse a form with other logits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.rejected.rotation_as_rows import RotatingProjection, folded_as_rows
from benchmarks.rejected.shifted_patches_as_convolution import (
    ConvolvedPatches,
    MergingOfImages,
    SelectedPatches,
    folded_dense,
    folded_grouped,
    folded_views,
)
from benchmarks.shared import two_forms
from benchmarks.shared.cpu_programs import RUNNERS
from benchmarks.shared.families import eager
from benchmarks.shared.systems import SYSTEMS, System, system_model
from gmmvit_deploy.families import family_named
from gmmvit_deploy.families.rmt.attention import FoldedRotation, ManhattanAttention, PairRotation
from gmmvit_deploy.layers.blocks import flat_patches
from gmmvit_deploy.layers.shifted_patches import ShiftedMerging, ShiftedPatches, ShiftedViews
from gmmvit_deploy.specs import MaskSpec, ModelSpec, input_shape
from tests.bench.conftest import NEEDS_KERNELS, Run


def small_system(name: str, spec: ModelSpec) -> System:
    return replace(SYSTEMS[name], spec=spec, shortened={})


def require_forms(row: dict[str, Any], forms: set[str]) -> None:
    """Check the row of a system at batch 1: each form in each runner, with a ratio and right logits."""
    assert row["float64_difference"].keys() == forms
    assert all(0 <= difference <= 1e-9 for difference in row["float64_difference"].values())
    assert row["1"].keys() == RUNNERS.keys()
    for runner in row["1"].values():
        assert runner["forms"].keys() == forms
        for values in (runner, *runner["forms"].values()):
            assert 0 < values["off"] <= values["limit"]
        for values in runner["forms"].values():
            assert 0 < values["over_exported"]["low"] <= values["over_exported"]["high"]


@NEEDS_KERNELS
@pytest.mark.export
@pytest.mark.matrix
def test_rotation_as_rows_runs_and_checks_its_answers(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SYSTEMS, "rmt", small_system("rmt", family_named("rmt").small(MaskSpec(kind="decay"))))
    out = tmp_path / "result.json"
    run("rejected/rotation_as_rows", "--rounds", "2", "--batch", "1", "--output", str(out))
    require_forms(json.loads(out.read_text())["systems"]["rmt"], {"rows"})


@NEEDS_KERNELS
@pytest.mark.export
@pytest.mark.matrix
def test_shifted_patches_as_convolution_runs_and_checks_its_answers(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(SYSTEMS["swin_spt_lsa"].spec, depths=(1, 1, 1))
    monkeypatch.setitem(SYSTEMS, "swin_spt_lsa", small_system("swin_spt_lsa", spec))
    out = tmp_path / "result.json"
    only = ("--system", "swin_spt_lsa", "--batch", "1")
    run("rejected/shifted_patches_as_convolution", "--rounds", "2", *only, "--output", str(out))
    require_forms(json.loads(out.read_text())["systems"]["swin_spt_lsa"], {"dense", "grouped", "views"})


def test_the_rotation_is_in_the_rows_of_the_projection() -> None:
    model = system_model(family_named("rmt").small(MaskSpec(kind="decay")))
    folded = folded_as_rows(model)
    assert not [module for module in folded.modules() if isinstance(module, PairRotation | FoldedRotation)]
    attentions = [module for module in folded.modules() if isinstance(module, ManhattanAttention)]
    assert len(attentions) == 2
    for attention in attentions:
        assert isinstance(attention.qkv, RotatingProjection)
        assert attention.qkv.rows.weight.shape == (160, 32)


@pytest.mark.parametrize(
    ("form", "convolved", "images"),
    [(folded_dense, 1, 0), (folded_grouped, 3, 2), (folded_views, 0, 2)],
    ids=["dense", "grouped", "views"],
)
def test_the_patches_of_swin_are_convolved(form: two_forms.Form, convolved: int, images: int) -> None:
    """A Swin has a patch embedding and two mergings of tokens; the form *dense* changes the embedding only."""
    folded = form(system_model(replace(SYSTEMS["swin_spt_lsa"].spec, depths=(1, 1, 1))))
    kinds = [type(module) for module in folded.modules()]
    assert kinds.count(ConvolvedPatches) == convolved
    assert kinds.count(ShiftedPatches) == 3 - convolved
    assert (kinds.count(MergingOfImages), kinds.count(ShiftedMerging)) == (images, 2 - images)


@pytest.mark.parametrize("wrong", [1e-3, float("nan")])
def test_a_form_with_other_logits_is_refused(wrong: float) -> None:
    spec = replace(SYSTEMS["vit_spt_lsa"].spec, depth=1)
    exported, other = system_model(spec), system_model(spec)
    images = torch.randn(1, *input_shape(spec), generator=torch.Generator().manual_seed(0))
    assert two_forms.float64_difference("same", other, exported, images) == 0
    with torch.no_grad():
        other.head.bias += wrong
    with pytest.raises(SystemExit, match="other: the float64 logits differ by"):
        two_forms.float64_difference("other", other, exported, images)
    programs = {"right": [eager(exported)], "a copy": [eager(exported), eager(other)]}
    rows = two_forms.require_right_logits(exported, {"right": programs["right"]}, {"right": "fp32"}, images.numpy())
    assert 0 < rows["right"]["off"] <= rows["right"]["limit"]
    with pytest.raises(SystemExit, match="a copy: the logits differ by"):
        two_forms.require_right_logits(exported, programs, dict.fromkeys(programs, "fp32"), images.numpy())


@pytest.mark.parametrize("side", [2, 4, 8])
@pytest.mark.parametrize("grouped", [False, True], ids=["dense", "grouped"])
def test_a_convolution_selects_the_shifted_patches_bit_for_bit(side: int, grouped: bool) -> None:
    select = SelectedPatches(side, 3, grouped=grouped)
    image = torch.randn(2, 3, 3 * side, 4 * side, generator=torch.Generator().manual_seed(side))
    assert select(image).equal(flat_patches(ShiftedViews(side // 2)(image), side)[..., select.order])
