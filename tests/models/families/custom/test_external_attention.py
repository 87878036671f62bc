"""The documented class with single-head external attention: BatchNorm, both normalisations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.bundle.variants import graph_file, open_variant
from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.exporting.bundle_from_checkpoint import ExportOptions, bundle_from_checkpoint
from gmmvit_deploy.exporting.variants import variant_from_bundle
from gmmvit_deploy.inference.precision import CALIBRATED, Precision
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.runtimes.programs.emulated_precision import emulated_logits
from gmmvit_deploy.runtimes.programs.image_batches import open_images
from gmmvit_deploy.runtimes.runners._openvino import OpenVinoRunner
from gmmvit_deploy.runtimes.runners.onnxruntime import OnnxRuntimeRunner
from tests.models.families.custom.own_files import documented_code, forget_files, save_weights

pytestmark = [pytest.mark.integration, pytest.mark.nightly]


def hints(source: Path) -> LoadHints:
    return LoadHints(model=f"{source}:Classifier", image_size=16, channels=3)


OTHERS: tuple[Precision, ...] = ("fp16", "int8")  # bf16 has the nodes of fp16, and fp8 those of int8


@dataclass(frozen=True)
class External:
    """A bundle of the class in three precisions, the file of the class, and the trained network."""

    bundle: Bundle
    source: Path
    network: Any


def trained(source: Path, path: Path) -> nn.Module:
    """Save weights as after training on a GPU: statistics other than 0 and 1, and two memories that differ."""
    network: Any = save_weights(source, path, cls="Classifier")
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
                module.weight.uniform_(0.5, 2)
                module.bias.normal_()
        network.attention.linear_1.weight = nn.Parameter(torch.randn(network.attention.linear_1.weight.shape))
    torch.save({"model": network.state_dict()}, path)
    return network


@pytest.fixture(scope="module")
def external(tmp_path_factory: pytest.TempPathFactory) -> External:
    folder = tmp_path_factory.mktemp("external")
    (folder / "external.py").write_text(documented_code(), encoding="utf-8")
    network = trained(folder / "external.py", folder / "external.pth")
    images = np.random.default_rng(0).standard_normal((16, 3, 16, 16), dtype=np.float32)
    np.save(folder / "images.npy", images)
    with pytest.MonkeyPatch.context() as patch:
        forget_files(patch)
        bundle = bundle_from_checkpoint(
            folder / "external.pth",
            folder / "bundle",
            ExportOptions(input_kind="tensor", max_batch=4),
            hints=hints(folder / "external.py"),
        )
        for precision in OTHERS:
            data = open_images(bundle, str(folder / "images.npy"), limit=16) if precision in CALIBRATED else None
            variant_from_bundle(bundle, precision, calibration=data)
    return External(bundle, folder / "external.py", network)


def graph_in(external: External, precision: Precision) -> ir.Model:
    return ir.load(external.bundle.path / graph_file(precision))


def weights_before_division(network: Any, images: torch.Tensor) -> torch.Tensor:
    """Return the weights (B, slots, positions) after the softmax over the positions."""
    with torch.inference_mode():
        scores = network.attention.linear_0(network.attention.conv1(network.stem(images)).flatten(2))
        return scores.softmax(-1)


def test_both_memories_have_the_values_of_the_file(external: External) -> None:
    """The constructor makes the second memory a view of the first; the file holds two that differ."""
    images = torch.randn(4, 3, 16, 16)
    model = load_checkpoint(external.source.with_name("external.pth"), hints(external.source)).model
    with torch.inference_mode():
        torch.testing.assert_close(model(images), external.network(images))
    stored = external.bundle.golden_set()
    with torch.inference_mode():
        expected = external.network(torch.from_numpy(stored.tensors)).numpy()
    np.testing.assert_allclose(stored.logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("precision", ["fp32", *OTHERS])
def test_positions_whose_weights_all_underflow(precision: Precision, external: External) -> None:
    """Without the 1e-9 these positions would be 0/0.  In int8 and fp8, saturation keeps the scores small."""
    images = 1000 * torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    sums = weights_before_division(external.network, images).sum(1)
    assert (sums == 0).any()
    logits = emulated_logits(graph_in(external, precision), images.numpy(), name=precision)
    assert np.isfinite(logits).all()
    if precision != "fp32":
        return
    with torch.inference_mode():
        expected = external.network(images).numpy()
    near = {"rtol": 0, "atol": 1e-4 * np.abs(expected).max()}
    np.testing.assert_allclose(logits, expected, **near)
    for runner in (
        OnnxRuntimeRunner(external.bundle),
        OpenVinoRunner(external.bundle, open_variant(external.bundle, "fp32")),
    ):
        with runner:
            np.testing.assert_allclose(runner.run(images.numpy()), expected, **near, err_msg=runner.name)
