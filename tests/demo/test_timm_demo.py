"""The demo with a classifier of timm: trained, saved as a model folder, exported without options, served."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

from gmmvit_deploy.bundle.artifacts import open_bundle
from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.demo import run as module
from gmmvit_deploy.demo._timm_model import DemoTimmModel
from gmmvit_deploy.demo.models import DemoModel, OwnModel
from gmmvit_deploy.demo.run import run_demo
from gmmvit_deploy.errors import InputError, MissingDependencyError, SpecError
from gmmvit_deploy.exporting.bundle_from_checkpoint import ExportOptions
from gmmvit_deploy.models.specs import MaskKind
from gmmvit_deploy.runtimes.runners.names import RUNNERS

pytestmark = pytest.mark.nightly

MASKS: Sequence[MaskKind] = ("plain", "gmm", "elm", "decay")


def built(model: DemoModel[Any]) -> Any:
    """Return the network of a model in evaluation mode, with weights large enough for uneven attention."""
    torch.manual_seed(0)
    network: nn.Module = model.build()
    with torch.no_grad():
        for path, parameter in network.named_parameters():
            if ".mask." not in path:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return network.eval()


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_demo_of_a_masked_timm_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo with a short training, so that the accuracy is only compared between the programs, and without its
    last step: to time a bundle is the same for every model.
    """
    monkeypatch.setattr(module, "_benched", lambda *arguments: "")
    monkeypatch.setattr(DemoTimmModel, "epochs", 3)
    monkeypatch.setattr(module, "_MIN_TOP1", 0.1)
    result = run_demo(tmp_path / "out", model="timm:test_vit", mask="gmm")
    assert len(set(result.top1.values())) == 1, result.top1
    assert {"Triton, grpc", "Triton, http"} <= set(result.top1)  # on PNG bytes
    assert {name.partition(":")[0] for name in result.top1} & set(RUNNERS)  # on PNG bytes, in process
    assert result.checkpoint == result.path / "model"
    assert {file.name for file in result.checkpoint.iterdir()} == {"model.safetensors", "config.json"}
    steps = {step.name: step for step in result.steps}
    assert steps["export"].command == "gmmvit export model -o bundle"
    manifest = open_bundle(result.path / "bundle").manifest
    assert len(manifest.masks) == 6
    assert manifest.image == DemoTimmModel("test_vit").image
    assert manifest.labels == tuple("0123456789")
    assert "each of the 6 attentions is a single fp16 kernel" in steps["build"].result
    assert {Image.open(path).size for path in (result.path / "images").glob("*/*.png")} == {(8, 8)}
    assert "<svg" in (result.path / "parity.html").read_text()


@pytest.mark.parametrize("mask", MASKS)
def test_model_folder_states_all_that_the_export_needs(tmp_path: Path, mask: MaskKind) -> None:
    model = DemoTimmModel("timm:test_vit", mask)
    network = built(model)
    model.save(network, tmp_path / "model", epoch=1)
    loaded = load_checkpoint(tmp_path / "model")
    assert (loaded.spec.mask.kind, loaded.spec.description) == (mask, "test_vit")
    assert (loaded.spec.channels, loaded.spec.image_shape, loaded.spec.classes) == (1, (32, 32), 10)
    options = ExportOptions().completed(loaded.images)
    image = model.image
    assert (options.mean, options.std) == (image.mean, image.std)
    assert (options.resize, options.crop_pct) == (image.resize, image.crop_pct)
    assert options.labels == tuple("0123456789")
    images = torch.randn(3, 1, 32, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(loaded.model.double()(images), network.double()(images), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "pit_ti_224", "deit_tiny_distilled_patch16_224"])
def test_other_architectures_take_the_digits(name: str) -> None:
    model = DemoTimmModel(name, "plain")
    with torch.device("meta"):  # without weights, so that large models take no time
        assert model.build().eval()(torch.zeros(2, 1, 32, 32)).shape == (2, 10)


def test_models_that_the_demo_cannot_train(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="has no architecture 'test_vat'"):
        DemoTimmModel("timm:test_vat")
    with pytest.raises(InputError, match="expected the name of an architecture of timm"):
        DemoTimmModel("torchvision:VisionTransformer")
    with pytest.raises(SpecError, match="got no attention"):
        DemoTimmModel("test_resnet", "gmm").build()
    with pytest.raises(InputError, match="expected one of plain, gmm, elm for the demo's own ViT, got decay"):
        OwnModel("decay")
    monkeypatch.setitem(sys.modules, "timm", None)  # importing it raises ImportError
    with pytest.raises(MissingDependencyError, match="timm") as missing:
        run_demo(tmp_path / "out", model="test_vit")
    assert re.search(r"gmmvit-deploy\[timm\]", missing.value.hint)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mask", ["plain", "elm"])
def test_own_model_with_another_mask(tmp_path: Path, mask: MaskKind) -> None:
    model = OwnModel(mask)
    network = built(model)
    model.save(network, tmp_path / model.checkpoint, epoch=1)
    loaded = load_checkpoint(tmp_path / model.checkpoint, model.hints)
    assert loaded.spec == model.spec
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(images), network(images), rtol=0, atol=0)
