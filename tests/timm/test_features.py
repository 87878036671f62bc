"""Features of timm's networks, from the checkpoint to the graph: held to timm's own values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.bundle.variants import open_variant
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.exporting.bundle_from_checkpoint import ExportOptions, bundle_from_checkpoint
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.parity.check import check_parity
from gmmvit_deploy.runtimes.runners._openvino import OpenVinoRunner
from gmmvit_deploy.runtimes.runners.onnxruntime import OnnxRuntimeRunner
from tests.cli.terminal import Gmmvit
from tests.conftest import once
from tests.runtimes.kernels.test_masked_attention import needs_kernel

pytestmark = pytest.mark.integration
ARGUMENTS = {"img_size": 32}


def saved(folder: Path, classes: int) -> tuple[Path, torch.nn.Module]:
    torch.manual_seed(0)
    network = timm.create_model("test_vit", num_classes=classes, **ARGUMENTS).eval()
    torch.save(network.state_dict(), folder / "checkpoint.pth")
    return folder / "checkpoint.pth", network


def hints(**changes: bool) -> LoadHints:
    return LoadHints(model="test_vit", model_args=ARGUMENTS, **changes)


def options(**changes: object) -> ExportOptions:
    values = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "resize": "stretch-bilinear", "max_batch": 8}
    return ExportOptions(**{**values, **changes})


@pytest.fixture(scope="module")
def both(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A classifier with logits and features; the label ``b`` occurs twice."""
    file, _ = saved(tmp_path_factory.mktemp("timm"), 3)
    chosen = options(labels=("a", "b", "b"), outputs=("logits", "features"), normalise=True)
    return once(shared / "both", lambda out: bundle_from_checkpoint(file, out, chosen, hints=hints()))


@pytest.mark.nightly
@pytest.mark.parametrize("classes", [0, 3], ids=["backbone without a head", "classifier"])
@torch.no_grad()
def test_features_are_those_of_timm(classes: int, tmp_path: Path) -> None:
    file, network = saved(tmp_path, classes)
    bundle = bundle_from_checkpoint(
        file, tmp_path / "b", options(outputs=("features",)), hints=hints(only_features=True)
    )
    golden = bundle.golden_set()
    tokens = network.forward_features(torch.from_numpy(golden.tensors))
    expected = network.forward_head(tokens, pre_logits=True).numpy()
    np.testing.assert_allclose(golden.logits, expected, rtol=0, atol=1e-5)
    assert [(output.name, output.shape) for output in bundle.manifest.outputs] == [("features", (64,))]
    assert bundle.manifest.labels == ()
    with OnnxRuntimeRunner(bundle) as runner:
        report = check_parity(bundle, [runner])
    verdicts = {check.name: check.verdict for check in report.runners[0].checks}
    assert (verdicts["numeric"], verdicts["decisions"], report.verdict) == ("passed", "skipped", "passed")


@pytest.mark.nightly
@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=needs_kernel)], ids=["plain", "kernels"])
def test_every_runtime_computes_both_outputs(kernels: bool, both: Bundle) -> None:
    golden = both.golden_set()
    openvino = OpenVinoRunner(both, open_variant(both, "fp32"), kernels=kernels)
    for runner in (openvino,) if kernels else (OnnxRuntimeRunner(both), openvino):
        with runner:
            answers = runner.rows_all(golden.inputs)
            assert list(answers) == ["logits", "features"]
            np.testing.assert_allclose(answers["features"], golden.features, rtol=0, atol=1e-4)
            assert np.array_equal(answers["logits"], runner.rows(golden.inputs))


@pytest.mark.nightly
def test_parity_compares_the_features_beside_the_logits(both: Bundle) -> None:
    with OnnxRuntimeRunner(both) as runner:
        (report,) = check_parity(both, [runner]).runners
        compared = [numbers["inputs"] for numbers in report.check("numeric").details["sets"]]
        assert compared == ["golden", "random"] * 2 + ["golden, features", "random, features"] * 2
        assert report.check("numeric").verdict == "passed"
        real = runner.run_all
        runner.run_all = lambda batch: {**real(batch), "features": real(batch)["features"] * 1.001}  # type: ignore[method-assign]
        (report,) = check_parity(both, [runner]).runners
    assert report.check("numeric").verdict == "failed"
    assert "reference inputs, features" in report.check("numeric").reasons[0]


def test_classify_writes_features(both: Bundle, bundle: Bundle, tmp_path: Path, gmmvit: Gmmvit) -> None:
    Image.fromarray(np.full((40, 32, 3), 90, np.uint8)).save(tmp_path / "x.png")
    (tmp_path / "y.png").write_bytes(b"no image")
    out = tmp_path / "f.npz"
    answer = gmmvit("classify", tmp_path / "x.png", tmp_path / "y.png", "--bundle", both.path, "--features", out)
    assert answer.returncode == 1  # y.png
    assert "b (1) " in answer.stdout
    assert "b (2) " in answer.stdout
    with np.load(out) as written:
        assert written["files"].tolist() == [str(tmp_path / "x.png")]
        assert written["features"].shape == (1, 64)
        assert written["features"].dtype == np.float32
    answer = gmmvit("classify", tmp_path / "x.png", "--bundle", bundle.path, "--features", tmp_path / "g.npz")
    assert answer.returncode == 1
    assert f"{bundle.path}: expected a network with features, but its only output is logits" in answer.stderr
    assert "gmmvit export CHECKPOINT -o BUNDLE --outputs both" in answer.stderr
    assert not (tmp_path / "g.npz").exists()


def test_only_features_have_unit_length() -> None:
    with pytest.raises(InputError, match="the outputs have no features") as caught:
        options(normalise=True)
    assert "--outputs both" in caught.value.hint


def test_a_backbone_without_a_head_has_no_logits(tmp_path: Path) -> None:
    file, _ = saved(tmp_path, 0)
    with pytest.raises(InputError, match="the network has no classifier, so that it has no logits"):
        bundle_from_checkpoint(
            file,
            tmp_path / "b",
            options(labels=("a",), outputs=("logits", "features")),
            hints=hints(only_features=True),
        )
