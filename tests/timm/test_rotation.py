"""Rotary position embeddings of timm's networks: constants that the kernels take, and whose mistakes parity names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.exporting.bundle_from_checkpoint import ExportOptions, bundle_from_checkpoint
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.sources.hints import LoadHints
from tests.conftest import once
from tests.parity.faults import rebuilt
from tests.parity.test_faults import judged
from tests.runtimes.kernels.test_masked_attention import needs_kernel
from tests.uneven_attention import perturbed

pytestmark = pytest.mark.integration
ARCHITECTURE = "vit_small_patch16_dinov3"
ARGUMENTS = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}


@pytest.fixture(scope="module")
def rotary(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    file = tmp_path_factory.mktemp("rotary") / "checkpoint.pth"
    torch.manual_seed(0)
    network = timm.create_model(ARCHITECTURE, num_classes=3, **ARGUMENTS).eval()
    torch.save(perturbed(network).state_dict(), file)
    hints = LoadHints(model=ARCHITECTURE, model_args=ARGUMENTS, image_size=32)
    options = ExportOptions(mean=(0.5,) * 3, std=(0.5,) * 3, resize="stretch-bilinear", max_batch=8)
    return once(shared / "rotary", lambda out: bundle_from_checkpoint(file, out, options, hints=hints))


@needs_kernel
def test_the_kernels_give_the_logits(rotary: Bundle) -> None:
    judgement = judged(rotary, "--runner", "openvino+kernels")
    assert judgement.checks["numeric"]["verdict"] == "passed"
    assert judgement.report["runners"][0]["provenance"]["attentions in our kernel"] == "2 of 2"


def exchanged(grid: torch.Tensor) -> torch.Tensor:
    return grid.transpose(-3, -2)


def of_half_the_side(grid: torch.Tensor) -> torch.Tensor:
    return grid[..., [0, 0, 2, 2], :, :][..., [0, 0, 2, 2], :]


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (exchanged, "rotation with rows and columns of the grid exchanged"),
        (of_half_the_side, "rotation of a grid of half the side"),
    ],
)
def test_the_rotation_of_another_grid_is_named(
    change: Callable[[torch.Tensor], torch.Tensor], named: str, rotary: Bundle, tmp_path: Path
) -> None:
    def rotate_otherwise(model: Model) -> None:
        (rotation,) = (module for module in model.modules() if hasattr(module, "get_embed"))
        compute = rotation.get_embed
        rotation.get_embed = lambda *args, **options: change(compute(*args, **options).unflatten(-2, (4, 4))).flatten(
            -3, -2
        )

    judgement = judged(rebuilt(rotary, tmp_path / "bundle", rotate_otherwise), "--localize")
    assert judgement.failed == {"numeric", "localize"}
    assert named in judgement.checks["numeric"]["reasons"][-1]
    assert judgement.checks["localize"]["details"]["first"] == "network.blocks.0"
