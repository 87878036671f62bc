"""Golden folders give the stored logits of transformers, whatever version of transformers builds the network."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.models.sources.hints import LoadHints
from tests.hugging_face.golden import CASES, FOLDER

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("name", CASES)
def test_a_golden_folder_gives_the_logits_of_transformers(name: str) -> None:
    case, stored = CASES[name], np.load(FOLDER / f"{name}.npz")
    model = load_checkpoint(FOLDER / name, LoadHints(**case.hints)).model.double()
    with torch.no_grad():
        logits = model(torch.from_numpy(stored["images"]).double()).numpy()
    assert stored["logits"].std() > 0.05
    np.testing.assert_allclose(logits, stored["logits"], rtol=0, atol=case.atol)
