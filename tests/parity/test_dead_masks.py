"""Bundles of models with a mask that has no influence on the logits: parity and kernels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.checkpoints.weights import bytes_from_model
from gmmvit_deploy.export.bundle_from_checkpoint import ExportOptions, bundle_from_checkpoint
from gmmvit_deploy.inference.matcher import MatchedAttention, attentions_in_onnx
from gmmvit_deploy.inference.openvino_program import OpenVinoProgram
from gmmvit_deploy.models.families import model_from_spec
from gmmvit_deploy.models.families.pit.spec import PiTSpec
from gmmvit_deploy.models.folding.fold import fold
from gmmvit_deploy.models.specs import MaskSpec
from gmmvit_deploy.parity._constants import check_constants
from gmmvit_deploy.parity.reference import Reference
from gmmvit_deploy.parity.suspects import explain, suspects
from gmmvit_deploy.runtimes.programs.onnxruntime import program_from_onnx
from gmmvit_deploy.runtimes.programs.openvino import our_kernels

pytestmark = pytest.mark.integration

LAST = "stages.2.0.attention"


def exported(spec: PiTSpec, folder: Path) -> Bundle:
    torch.manual_seed(0)
    checkpoint = folder / "weights.safetensors"
    checkpoint.write_bytes(bytes_from_model(model_from_spec(spec).eval()))
    return bundle_from_checkpoint(checkpoint, folder / "bundle", ExportOptions(input_kind="tensor", max_batch=4))


def pit(depths: tuple[int, ...]) -> PiTSpec:
    stages = len(depths)
    return PiTSpec(
        image_size=16, patch_size=2, classes=5, dim=32, depths=depths, heads=(2, 4, 8)[:stages],
        head_dim=16, mlp_dims=(32, 64, 128)[:stages], mask=MaskSpec(kind="gmm", kernels=3),
    )  # fmt: skip


@pytest.mark.nightly
def test_mistakes_in_a_dead_mask_are_not_suspects(tmp_path: Path) -> None:
    """The only mask of a PiT with a single attention is dead."""
    bundle = exported(pit((1,)), tmp_path)
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


@pytest.mark.nightly
def test_kernels_take_attentions_with_and_without_a_mask_in_a_model(tmp_path: Path) -> None:
    bundle = exported(pit((1, 1, 1)), tmp_path)
    matches = attentions_in_onnx(bundle.onnx_path.read_bytes())
    taken = [match for match in matches if isinstance(match, MatchedAttention)]
    assert [(match.name, match.mask is not None) for match in taken] == [
        ("stages.0.0.attention", True),
        ("stages.1.0.attention", True),
        (LAST, False),
    ]
    assert taken[-1].scale == pytest.approx(16**-0.5)
    kernels, why = our_kernels("fp32")
    if kernels is None:
        pytest.skip(why)
    inputs = np.random.default_rng(0).standard_normal((4, 3, 16, 16), dtype=np.float32)
    own = OpenVinoProgram(str(bundle.onnx_path), hint="f32", kernels=kernels)
    assert own.fused_attentions == 3
    plain = program_from_onnx(bundle.onnx_path)
    np.testing.assert_allclose(own.run(inputs), plain.run(inputs), atol=2e-5)
