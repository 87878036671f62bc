"""EANet: its memories and normalisations, what folding refuses, and files that are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gmmvit_deploy.checkpoints.loading import LoadedCheckpoint, load_checkpoint
from gmmvit_deploy.checkpoints.reading import read_tensors
from gmmvit_deploy.errors import CheckpointError, GmmvitError
from gmmvit_deploy.exporting.graphs_of_precisions import graph_from_model
from gmmvit_deploy.inference.precision import CALIBRATED, Precision
from gmmvit_deploy.models.families.eanet import EANET, folding
from gmmvit_deploy.models.families.eanet.model import EANet, ExternalAttention
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.runtimes.programs.emulated_precision import emulated_logits
from tests.conftest import golden
from tests.models.families.small_specs import small_spec

SMALLEST = "eanet_tied_cpu"


def loaded(name: str, **hints: Any) -> LoadedCheckpoint:
    case = golden(name)
    return load_checkpoint(case.path, LoadHints(**hints) if hints else case.hints)


# ---- folding -------------------------------------------------------------------------------------------------------


def test_folding_refuses_a_pass_that_changes_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded(SMALLEST).model
    trained = ExternalAttention.forward
    monkeypatch.setattr(ExternalAttention, "forward", lambda self, x, first=False: 2 * trained(self, x, first=first))
    with pytest.raises(GmmvitError, match=r"blocks\.0\.attention: folding changed the output by"):
        folding.merge_memories(model)


# ---- the two normalisations ----------------------------------------------------------------------------------------


@pytest.mark.first(1)
@pytest.mark.integration
@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_a_graph_gives_finite_logits_where_weights_underflow(precision: Precision) -> None:
    """Weights that underflow to 0 in every slot of most tokens; without the 1e-9 they would be 0/0.  bf16 has the nodes
    of fp16, and fp8 those of int8.
    """
    model = EANET.build(replace(small_spec("eanet"), slots=2)).eval()  # 5 tokens: most win no slot
    assert isinstance(model, EANet)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.project.weight.mul_(100)
            block.attention.to_slots.weight.mul_(10)
    images = np.random.default_rng(0).standard_normal((4, 3, 32, 32), dtype=np.float32)
    weights: list[Tensor] = []
    model.blocks[0].attention.weights.register_forward_hook(lambda _, __, out: weights.append(out))
    with torch.inference_mode():
        expected = model(torch.from_numpy(images)).numpy()
    assert (weights[0] == 0).unflatten(-1, (-1, 2)).all(-1).any()
    calibration = [images] if precision in CALIBRATED else None
    prepared = graph_from_model(model, precision, preprocessing=None, max_batch=4, calibration=calibration)
    logits = emulated_logits(prepared.model, images, name=precision)
    assert np.isfinite(logits).all()
    if precision == "fp32":
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-3)


# ---- files that are refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("suffix", "change", "message"),
    [
        ("pos_embed", lambda tensor: tensor[:, :-1], r"pos_embed, without the class token, has \d+ positions"),
        (
            "attention1.norm1.weight",
            lambda tensor: tensor[:-1],
            r"attention1\.norm1\.weight has shape \(146,\), expected \(98,\)",
        ),
        ("blocks.0.attn.linear_0.weight", lambda tensor: tensor[:, :-1], r"expected \(a multiple of D, D\) and"),
    ],
)
def test_files_that_do_not_fit_are_refused(
    suffix: str, change: Callable[[Tensor], Tensor], message: str, tmp_path: Path
) -> None:
    state = dict(read_tensors(loaded(SMALLEST).file.path).tensors)
    key = next(key for key in state if key.endswith(suffix))
    torch.save(state | {key: change(state[key])}, tmp_path / "eanet.pth")
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path / "eanet.pth")
