"""Averaged weights read as trained: parity with the weights of the file cannot see the mistake, golden logits can."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.models.sources.hints import WEIGHTS_KINDS, WeightsKind
from tests.conftest import MANIFEST, Golden, golden
from tests.exact import assert_same_logits, exact_logits

BOTH = ("deepvit_ema_amp", "eanet_performer", "rmt_tiny_like", "timm_vit", "timm_deit_distilled")
"""Golden files of training scripts that average the weights: a file for each family of such scripts, two for timm."""
AVERAGED_LOGITS = ("logits_ema64", "logits64_ema")
"""Names of the authors' logits with the averaged weights, if stored."""
FAR = 100


def logits_of(case: Golden, weights: WeightsKind) -> np.ndarray:
    return exact_logits(load_checkpoint(case.path, replace(case.hints, weights=weights)).model, case.inputs)


def test_a_file_of_every_family_with_averaged_weights_is_here() -> None:
    asked = {entry["family"] for entry in MANIFEST.values() if entry.get("hints", {}).get("weights") in WEIGHTS_KINDS}
    assert asked == {golden(name).family for name in BOTH}


@pytest.mark.first(2)
@pytest.mark.parametrize("name", BOTH)
def test_the_wrong_kind_of_weights_is_far_from_the_golden_logits(name: str) -> None:
    case = golden(name)
    entry = MANIFEST[name]
    stored = np.load(entry["folder"] / entry.get("inputs", f"{name}.npz"))
    trained, averaged = (logits_of(case, weights) for weights in WEIGHTS_KINDS)
    assert_same_logits(trained, stored["logits64"])
    assert np.abs(averaged - stored["logits64"]).max() > FAR * case.atol
    for key in set(AVERAGED_LOGITS) & {*stored.files}:
        assert_same_logits(averaged, stored[key])
        assert np.abs(trained - stored[key]).max() > FAR * case.atol
