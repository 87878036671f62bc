"""Bundles of models with a mask that has no influence on the logits: parity."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.checkpoints.weights import bytes_from_model
from gmmvit_deploy.exporting.bundle_from_checkpoint import ExportOptions, bundle_from_checkpoint
from gmmvit_deploy.models.families import model_from_spec
from gmmvit_deploy.models.families.pit.spec_and_source import PiTSpec
from gmmvit_deploy.models.folding.fold import fold
from gmmvit_deploy.models.specs import MaskSpec
from gmmvit_deploy.parity._constants import check_constants
from gmmvit_deploy.parity.reference import Reference
from gmmvit_deploy.parity.suspects import explain, suspects

pytestmark = [pytest.mark.integration, pytest.mark.nightly]


def test_mistakes_in_a_dead_mask_are_not_suspects(tmp_path: Path) -> None:
    """The only mask of a PiT with a single attention is dead."""
    spec = PiTSpec(
        image_size=16, patch_size=2, classes=5, dim=32, depths=(1,), heads=(2,), head_dim=16, mlp_dims=(32,),
        mask=MaskSpec(kind="gmm", kernels=3),
    )  # fmt: skip
    checkpoint = tmp_path / "weights.safetensors"
    checkpoint.write_bytes(bytes_from_model(model_from_spec(spec).eval()))
    options = ExportOptions(input_kind="tensor", max_batch=4)
    bundle = bundle_from_checkpoint(checkpoint, tmp_path / "bundle", options)
    assert bundle.manifest.masks == ()
    reference = Reference(bundle)
    checked = check_constants(bundle, reference)
    assert checked.summary == "the folded model has no masks and biases, so the graph has no constants to compare"
    inputs, _ = bundle.golden()
    trained, _ = reference.logits(inputs)
    given = dict(suspects(bundle, reference, inputs))
    assert not any(np.array_equal(logits, trained) for logits in given.values())
    assert "no mask at all" not in given
    assert "masks transposed" not in given
    assert "the class token's row masked with zeros" in given


def test_a_mistake_in_the_masks_of_the_graph_is_named(tensor_bundles: dict[str, Bundle]) -> None:
    bundle = tensor_bundles["pit_gmm"]
    reference = Reference(bundle)
    inputs, _ = bundle.golden()
    model = fold(reference.model).model
    for layer in ("stages.0.0", "stages.1.0", "stages.1.1"):
        mask = model.get_submodule(layer).attention.scores.before.mask
        mask.constant = mask.constant.roll(1, -2)
    with torch.inference_mode():
        shifted = model(reference.tensors(inputs)).numpy()
    name = "masks shifted by one token, down, only in the masks of the graph"
    assert explain(bundle, reference, inputs, shifted, 1e-5) == name
