from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.errors import CheckpointError
from gmmvit_deploy.models.families import FAMILIES, model_from_spec
from gmmvit_deploy.models.families.family import Family
from tests.checkpoints.test_loading import State, released_state, saved
from tests.conftest import GOLDEN
from tests.models.families.small_specs import SMALL

ALPHA, SIGMA, BASE = (f"transformer.layers.1.0.fn.mask.{part}" for part in ("alpha", "sigma", "mask"))


def findings(state: State, folder: Path) -> list[tuple[str, str, str]]:
    checkpoint = load_checkpoint(saved(folder, state))
    return [(finding.severity, finding.where, finding.what) for finding in checkpoint.findings]


def _edit(name: str, change: Callable[[torch.Tensor], None]) -> State:
    state = {key: tensor.clone() for key, tensor in released_state().items()}
    change(state[name])
    return state


def test_nothing_but_the_underflow_in_a_sound_file(tmp_path: Path) -> None:
    (only,) = findings(released_state(), tmp_path)
    assert only[0] == "note"
    assert only[2].startswith("0 of 4096 entries of the stored base mask underflowed to zero and 4 lost digits")


def bases_times(factor: float) -> State:
    """Return the released state with every base mask of the layers changed alike."""
    state = {key: tensor.clone() for key, tensor in released_state().items()}
    for key, tensor in state.items():
        if key.endswith("mask") and tensor.ndim == 4:
            tensor.mul_(factor)
    return state


def test_a_base_that_another_processor_rounded_is_no_finding(tmp_path: Path) -> None:
    assert len(findings(bases_times(1 + 2.0**-23), tmp_path)) == 1  # the underflow


def test_another_base_is_noted(tmp_path: Path) -> None:
    noted = [finding for finding in findings(bases_times(1 + 1e-6), tmp_path) if "sqrt(exp(−d²))" in finding[2]]
    assert [severity for severity, _, _ in noted] == ["note"]


@pytest.mark.parametrize(
    ("state", "where", "what"),
    [
        (_edit(SIGMA, lambda t: t[2, 1].fill_(0.01)), "blocks.1 head 1 kernel 2", "attends only to itself"),
        (_edit(ALPHA, lambda t: t[3, 0].fill_(0)), "blocks.1 head 0 kernel 3", "the kernel has no effect"),
        (_edit(ALPHA, lambda t: t[:, 2].fill_(0)), "blocks.1 head 2", "mask is zero"),
        (_edit(SIGMA, lambda t: t[:, 2].fill_(1e6)), "blocks.1 head 2", "mask is constant"),
        (_edit(BASE, lambda t: t[0, 0, 0, 1].fill_(0.5)), "blocks.1", "differs from"),
        (_edit("mask", lambda t: t.fill_(0.5)), "mask", "unused base mask differs"),
    ],
    ids=["narrow sigma", "dead kernel", "zero mask", "constant mask", "bases differ", "root base differs"],
)
def test_oddities_are_named_with_their_place(state: State, where: str, what: str, tmp_path: Path) -> None:
    matching = [f for f in findings(state, tmp_path) if f[1] == where and what in f[2]]
    assert matching
    assert matching[0][0] == "warning"


@pytest.mark.parametrize("bias", [0.0, 0.5])
def test_a_classifier_head_of_zeros_warns(bias: float, tmp_path: Path) -> None:
    state = _edit("mlp_head.1.weight", torch.Tensor.zero_)
    state["mlp_head.1.bias"] = state["mlp_head.1.bias"].clone().fill_(bias)
    (warning,) = [finding for finding in findings(state, tmp_path) if finding[1] == "head"]
    assert warning[0] == "warning"
    assert warning[2].startswith("all weights of the classifier head are zero; fine-tuning starts from a zero head")
    assert warning[2].endswith("a deployed model with a zero head predicts the same class for every image")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_declares_its_classifier_head(family: Family) -> None:
    (head,) = dict(model_from_spec(SMALL[family.name]).classifier_heads()).values()
    assert head.out_features == SMALL[family.name].classes


def test_nan_in_an_unused_tensor_only_warns(tmp_path: Path) -> None:
    listed = findings(_edit("mask", lambda t: t.fill_(float("nan"))), tmp_path)
    assert ("warning", "mask") in [f[:2] for f in listed]


def test_a_mask_that_overflows_is_an_error(tmp_path: Path) -> None:
    state = _edit(ALPHA, lambda t: t.fill_(3e38))
    with pytest.raises(CheckpointError, match=r"blocks\.1: the mask has NaN or infinite"):
        load_checkpoint(saved(tmp_path, state))


def test_underflow_is_counted() -> None:
    (note,) = [f for f in load_checkpoint(GOLDEN / "vit_gmm_256_tokens.pth").findings if "underflowed" in f.what]
    assert note.what.startswith("21792 of 65536 entries")
