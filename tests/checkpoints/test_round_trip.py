"""Any model we can build, saved as the released code saves it, is read back as itself."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gmmvit_deploy.checkpoints.loading import load_checkpoint, released_state_dict
from gmmvit_deploy.models.families import model_from_spec
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.models.specs import ModelSpec
from tests.models.families.test_families import cait_specs, pit_specs, swin_specs, t2t_specs, vit_specs


@pytest.mark.nightly
@given(spec=st.one_of(vit_specs(), swin_specs(), cait_specs(), pit_specs(), t2t_specs()), seed=st.integers(0, 2**16))
@settings(max_examples=120, deadline=None)
def test_spec_and_weights_survive(spec: ModelSpec, seed: int) -> None:
    torch.manual_seed(seed)
    model = model_from_spec(spec).eval()
    heads = spec.heads[0] if isinstance(spec.heads, tuple) else spec.heads
    # The names of a plain ViT and a plain CaiT are also those of vit-pytorch.
    closed_form = True if spec.mask.closed_form else None
    source = "spt-lsa" if spec.mask.kind == "plain" else None
    hints = LoadHints(heads=heads, closed_form=closed_form, source=source)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pth"
        torch.save({"model_state_dict": released_state_dict(model)}, path)
        loaded = load_checkpoint(path, hints)
    # With a single head, shared and separate masks look the same in a file.
    alone = set(spec.heads if isinstance(spec.heads, tuple) else (spec.heads,)) == {1}
    assert loaded.spec == replace(spec, mask=replace(spec.mask, shared=spec.mask.shared and not alone))
    expected = model.state_dict()
    restored = loaded.model.state_dict()
    assert restored.keys() == expected.keys()
    assert all(restored[name].equal(expected[name]) for name in expected)
