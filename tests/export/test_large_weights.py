"""Weights too large for a protobuf lie in a file beside the graph, and every later step reads them there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from gmmvit_deploy.bundle.artifacts import Bundle, open_bundle
from gmmvit_deploy.bundle.variants import open_variant
from gmmvit_deploy.errors import BundleError, InputError
from gmmvit_deploy.exporting.bundle_from_checkpoint import bundle_from_checkpoint
from gmmvit_deploy.exporting.variants import variant_from_bundle
from gmmvit_deploy.graphs import weights
from gmmvit_deploy.inference.runner_name import RunnerName
from gmmvit_deploy.parity.check import check_parity
from gmmvit_deploy.parity.options import ParityOptions
from gmmvit_deploy.runtimes.runners.open import open_runners
from gmmvit_deploy.runtimes.runners.triton import TritonRunner
from gmmvit_deploy.serving.options import RepositoryOptions
from gmmvit_deploy.serving.repository import repository_from_bundle
from gmmvit_deploy.serving.server import ServerOptions, TritonServer
from tests.conftest import FREE_PORTS, GOLDEN, cifar_options

pytestmark = pytest.mark.integration
MODULE = "gmmvit_deploy.exporting.bundle_from_checkpoint"


@pytest.fixture(scope="module")
def large(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bundle]:
    """As ``bundle``, which is made first, as if its weights were too large for a protobuf."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "EXTERNAL_FROM_BYTES", 10_000)
        patch.setattr(weights, "_LARGE_BYTES", 1_000)
        path = tmp_path_factory.mktemp("large") / "bundle"
        yield bundle_from_checkpoint(GOLDEN / "vit_gmm.pth", path, cifar_options())


def test_the_graph_is_the_same(large: Bundle, bundle: Bundle) -> None:
    assert set(large.manifest.files) == {*bundle.manifest.files, "model.onnx.data"}
    assert large.onnx_path.stat().st_size < bundle.onnx_path.stat().st_size // 2
    there, expected = (onnx.load(each.onnx_path).graph for each in (large, bundle))
    assert [*there.node] == [*expected.node]
    for tensor, same in zip(there.initializer, expected.initializer, strict=True):
        assert tensor.name == same.name
        np.testing.assert_array_equal(numpy_helper.to_array(tensor), numpy_helper.to_array(same))
    assert open_bundle(large.path) == large


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.nightly
def test_the_other_precisions(large: Bundle, precision: str) -> None:
    variant = variant_from_bundle(large, precision)  # type: ignore[arg-type]
    assert (large.path / f"graphs/{precision}.onnx.data").is_file()
    assert variant.record is not None
    assert variant.record.golden["largest_rel"] < 0.1
    assert open_variant(large, precision) == variant  # type: ignore[arg-type]


def test_parity_and_the_runtimes(large: Bundle, bundle: Bundle) -> None:
    inputs, logits = bundle.golden()
    with open_runners(["onnxruntime", "openvino"], large) as runners:
        for runner in runners:
            np.testing.assert_allclose(runner.run(inputs), logits, rtol=0, atol=1e-5)
        assert check_parity(large, runners, ParityOptions(localize=True)).verdict == "passed"


@pytest.mark.parametrize("change", [lambda data: data[:-1] + b"x", lambda data: None], ids=["changed", "missing"])
def test_a_damaged_file_of_weights_is_refused(change, large: Bundle, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    content = {file.name: file.read_bytes() for file in large.path.iterdir() if file.is_file()}
    content["model.onnx.data"] = change(content["model.onnx.data"])
    for name, data in content.items():
        if data is not None:
            (tmp_path / name).write_bytes(data)
    with pytest.raises(BundleError, match=r"model\.onnx\.data"):
        open_bundle(tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("runtime", ["openvino", "onnxruntime"])
def test_a_server_reads_the_weights(runtime: str, large: Bundle, tmp_path: Path) -> None:
    options = RepositoryOptions(runner=RunnerName(runtime), threads=1)
    repository = repository_from_bundle(large, tmp_path / "models", options)
    inputs, logits = large.golden()
    with (
        TritonServer(repository.path, options=ServerOptions(**FREE_PORTS)) as server,
        TritonRunner(large, server.grpc_url, model=options.name) as runner,
    ):
        np.testing.assert_allclose(runner.run(inputs), logits, rtol=0, atol=1e-5)


def test_an_export_that_does_not_fit_is_refused_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{MODULE}.weights_bytes", lambda checkpoint, weights: 2 * 2**30)
    monkeypatch.setattr(f"{MODULE}.available_bytes", lambda: 6 * 2**30)
    with pytest.raises(InputError, match=r"2\.00 GiB of weights takes about 8\.5 GiB of memory, and 6\.0 GiB are"):
        bundle_from_checkpoint(GOLDEN / "vit_gmm.pth", tmp_path / "bundle", cifar_options())
    assert list(tmp_path.iterdir()) == []
