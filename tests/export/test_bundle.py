from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from gmmvit_deploy.bundle.artifacts import Bundle, open_bundle
from gmmvit_deploy.bundle.variants import open_variant
from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.errors import BundleError, ExportError, InputError, OutputError
from gmmvit_deploy.exporting import bundle_from_checkpoint as module
from gmmvit_deploy.exporting.bundle_from_checkpoint import ExportOptions, bundle_from_checkpoint
from gmmvit_deploy.exporting.variants import variant_from_bundle
from gmmvit_deploy.files.writing import sha256_of_bytes, sha256_of_file
from gmmvit_deploy.graphs import weights
from gmmvit_deploy.inference.preprocess import tensor_from_pixels
from gmmvit_deploy.inference.runner_name import RunnerName
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.parity.check import check_parity
from gmmvit_deploy.parity.options import ParityOptions
from gmmvit_deploy.progress import Progress
from gmmvit_deploy.runtimes.runners.eager import EagerRunner
from gmmvit_deploy.runtimes.runners.onnxruntime import OnnxRuntimeRunner
from gmmvit_deploy.runtimes.runners.open import open_runners
from gmmvit_deploy.runtimes.runners.triton import TritonRunner
from gmmvit_deploy.serving.options import RepositoryOptions
from gmmvit_deploy.serving.repository import repository_from_bundle
from gmmvit_deploy.serving.server import ServerOptions, TritonServer
from gmmvit_deploy.tolerances import Limit
from tests.conftest import EXPORTED, FREE_PORTS, GOLDEN, RELEASED, cifar_options, golden
from tests.golden_files import each_export


@pytest.mark.parametrize("name", each_export(EXPORTED))
def test_golden_logits_through_onnxruntime(name: str, tensor_bundles: dict[str, Bundle]) -> None:
    case = golden(name)
    with OnnxRuntimeRunner(tensor_bundles[name]) as runner:
        for rows in ([0], [1], [2], [3], [0, 1], [0, 1, 2], [0, 1, 2, 3], [2, 0, 3, 1]):
            np.testing.assert_allclose(runner.run(case.inputs[rows]), case.logits[rows], rtol=0, atol=case.atol)


@pytest.mark.first(1)
@pytest.mark.parametrize("name", [name for name in RELEASED if "plain" not in name])
def test_mask_hashes_are_those_of_the_trained_module_and_the_graph(
    name: str, tensor_bundles: dict[str, Bundle]
) -> None:
    bundle, case = tensor_bundles[name], golden(name)
    model = load_checkpoint(case.path, case.hints).model
    graph = onnx.load(bundle.onnx_path)
    constants = {i.name: numpy_helper.to_array(i) for i in graph.graph.initializer}
    notes = {entry.key: entry.value for entry in graph.metadata_props}
    assert bundle.manifest.masks
    for record in bundle.manifest.masks:
        scores = model.get_submodule(f"{record.layer}.scores")
        matrix = scores.before.mask.matrix().detach()
        assert record.constant_sha256 == sha256_of_bytes((matrix * scores.before.scale.factor).numpy().tobytes())
        assert record.constant_sha256 == sha256_of_bytes(constants[record.constant].tobytes())
        assert notes[f"gmmvit.mask_sha256.{record.layer}"] == record.constant_sha256
    for record in bundle.manifest.biases:
        matrix = model.get_submodule(f"{record.layer}.scores").before.bias.matrix().detach()
        assert record.constant_sha256 == sha256_of_bytes(matrix.numpy().tobytes())
        assert record.constant_sha256 == sha256_of_bytes(constants[record.constant].tobytes())


def test_pixels_are_normalised_inside_the_graph(bundle: Bundle) -> None:
    pixels, logits = bundle.golden()
    image = bundle.manifest.image
    assert image.mean is not None
    assert image.std is not None
    tensors = torch.from_numpy(tensor_from_pixels(pixels, image.mean, image.std))
    with torch.inference_mode():
        expected = load_checkpoint(GOLDEN / "vit_gmm.pth").model(tensors).numpy()
    np.testing.assert_array_equal(logits, expected)
    with OnnxRuntimeRunner(bundle) as runner:
        assert float(np.abs(runner.run(pixels) - expected).max()) < 1e-5


@pytest.mark.nightly
def test_exporting_twice_gives_the_same_bytes(bundle: Bundle, tmp_path: Path) -> None:
    events: list[Progress] = []
    options = cifar_options()
    again = bundle_from_checkpoint(GOLDEN / "vit_gmm.pth", tmp_path / "again", options, on_progress=events.append)
    assert again == open_bundle(tmp_path / "again")
    assert again.sha256 == bundle.sha256
    assert [(event.done, event.total) for event in events] == [(step, len(events)) for step in range(len(events))]
    assert events[0].step == "read the checkpoint"


def test_manifest_states_where_it_came_from(bundle: Bundle) -> None:
    manifest = json.loads((bundle.path / "manifest.json").read_text())
    assert manifest["checkpoint"]["sha256"] == sha256_of_file(GOLDEN / "vit_gmm.pth")
    assert manifest["trainable_parameters"] == 62548
    assert manifest["labels"][6] == "frog"
    assert manifest["folding"] == ["fold_masks", "merge_scale", "narrow_last_block"]
    assert set(manifest["files"]) == {"model.onnx", "weights.safetensors", "golden.npz", "labels.txt"}


@pytest.mark.nightly
@pytest.mark.integration
def test_closed_form_survives_the_bundle(tmp_path: Path) -> None:
    case = golden("vit_gmm_256_tokens")
    options = ExportOptions(input_kind="tensor", max_batch=4)
    closed = bundle_from_checkpoint(case.path, tmp_path / "closed", options, hints=LoadHints(closed_form=True))
    with OnnxRuntimeRunner(closed) as folded, EagerRunner(closed) as eager:
        logits = folded.run(case.inputs)
        np.testing.assert_allclose(logits, eager.run(case.inputs), rtol=0, atol=1e-5)
    assert float(np.abs(logits - case.logits).max()) > 1e-3  # another network, which its spec states
    assert closed.manifest.spec.mask.closed_form


class TestOptions:
    @pytest.mark.integration
    def test_one_output_needs_the_multi_label_task(self, tmp_path: Path) -> None:
        """The softmax of a single logit is 1, whatever the image."""
        content = torch.load(GOLDEN / "vit_gmm.pth", weights_only=True)
        for part in ("weight", "bias"):
            content["model_state_dict"][f"mlp_head.1.{part}"] = content["model_state_dict"][f"mlp_head.1.{part}"][:1]
        torch.save(content, tmp_path / "one.pth")
        with pytest.raises(InputError, match="softmax is 1 for every image") as caught:
            bundle_from_checkpoint(tmp_path / "one.pth", tmp_path / "b", cifar_options(labels=("defect",)))
        assert caught.value.hint.startswith("add --task multi --thresholds 0.5 --labels NAME")
        multi = cifar_options(labels=("n01440764: defect",), task="multi-label", thresholds=0.5)
        bundle = bundle_from_checkpoint(tmp_path / "one.pth", tmp_path / "b", multi)
        logits = bundle.golden()[1]
        given = bundle.manifest.label_set.probabilities(logits)
        np.testing.assert_allclose(given, 1 / (1 + np.exp(-logits.astype(np.float64))), atol=1e-12)
        assert bundle.manifest.labels == ("n01440764: defect",)

    @pytest.mark.nightly
    @pytest.mark.integration
    def test_max_batch_of_one(self, tmp_path: Path) -> None:
        single = bundle_from_checkpoint(GOLDEN / "vit_gmm.pth", tmp_path / "b", cifar_options(max_batch=1))
        inputs, logits = single.golden()
        with OnnxRuntimeRunner(single) as runner:
            np.testing.assert_allclose(runner.run(inputs[:1]), logits[:1], rtol=0, atol=1e-5)
            with pytest.raises(InputError, match=r"expected a batch of 1\.\.1 images"):
                runner.run(inputs[:2])


class TestNothingHalfWritten:
    def export(self, out: Path, **arguments: Any) -> Bundle:
        return bundle_from_checkpoint(GOLDEN / "vit_gmm.pth", out, cifar_options(), **arguments)

    @pytest.mark.nightly
    def test_force_replaces_a_bundle(self, tmp_path: Path, bundle: Bundle) -> None:
        out = tmp_path / "bundle"
        shutil.copytree(bundle.path, out)
        (out / "old").write_text("old")
        self.export(out, force=True)
        assert not (out / "old").exists()
        assert [path.name for path in tmp_path.iterdir()] == ["bundle"]

    @pytest.mark.integration
    def test_force_does_not_replace_the_files_of_others(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.txt").write_text("mine")
        with pytest.raises(OutputError, match=r"--force replaces an earlier output .* the folder holds thesis\.txt"):
            self.export(tmp_path, force=True)
        assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]

    def test_force_does_not_replace_the_checkpoint(self, tmp_path: Path) -> None:
        checkpoint = Path(shutil.copy(GOLDEN / "vit_gmm.pth", tmp_path))
        with pytest.raises(OutputError, match="holds the checkpoint"):
            bundle_from_checkpoint(checkpoint, tmp_path, cifar_options(), force=True)
        assert checkpoint.exists()

    def test_force_does_not_replace_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "bundle").write_text("a file")
        with pytest.raises(OutputError, match="expected a folder, got a file"):
            self.export(tmp_path / "bundle", force=True)
        assert (tmp_path / "bundle").read_text() == "a file"

    @pytest.mark.first(1)
    @pytest.mark.parametrize("force", [False, True])
    @pytest.mark.integration
    def test_failure_in_the_middle(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, force: bool) -> None:
        out = tmp_path / "deep" / "bundle"
        if force:
            out.mkdir(parents=True)
            (out / "old").write_text("old")
        nothing = Limit(largest=-1.0, rms=None, derivation="")
        monkeypatch.setattr(module, "limit_from_stored", lambda noise: nothing)
        with pytest.raises(ExportError, match=r"no runtime on this machine .* runner onnxruntime: the logits differ"):
            self.export(out, force=force)
        left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
        assert left == (["deep", "deep/bundle", "deep/bundle/old"] if force else [])

    def test_permissions_follow_the_umask(self, bundle: Bundle) -> None:
        umask = os.umask(0)
        os.umask(umask)
        assert bundle.path.stat().st_mode & 0o777 == 0o777 & ~umask


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _rewrite(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        data = json.loads((path / "manifest.json").read_text())
        change(data)
        (path / "manifest.json").write_text(json.dumps(data))

    return edit


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: _truncate(path / "model.onnx"), r"model\.onnx: the file was changed or damaged"),
        (
            lambda path: _truncate(path / "weights.safetensors"),
            r"weights\.safetensors: the file was changed or damaged",
        ),
        (lambda path: (path / "golden.npz").unlink(), r"golden\.npz is missing"),
        (lambda path: (path / "manifest.json").unlink(), r"has no manifest\.json"),
        (lambda path: (path / "manifest.json").write_text("{"), "expected a manifest of a bundle"),
        (_rewrite(lambda data: data.update(format="gmmvit-bundle/9")), "gmmvit-bundle/9"),
        (_rewrite(lambda data: data["files"].pop("golden.npz")), r"does not list golden\.npz"),
        (_rewrite(lambda data: data["files"].update({"../x": "0"})), "missing"),
        (shutil.rmtree, "does not exist"),
        (_rewrite(lambda data: data["outputs"][0].update(meaning="boxes")), "output 'logits': expected one of logits"),
    ],
)
def test_a_bundle_that_is_not_whole(
    damage: Callable[[Path], None], message: str, bundle: Bundle, tmp_path: Path
) -> None:
    path = tmp_path / "bundle"
    shutil.copytree(bundle.path, path)
    damage(path)
    with pytest.raises(BundleError, match=message):
        open_bundle(path)


@pytest.mark.parametrize(
    "batch",
    [
        np.zeros((2, 32, 32, 3), np.float32),
        np.zeros((2, 3, 32, 32), np.uint8),
        np.zeros((0, 32, 32, 3), np.uint8),
        np.zeros((9, 32, 32, 3), np.uint8),
        np.zeros((32, 32, 3), np.uint8),
    ],
    ids=["dtype", "layout", "empty", "over the maximum", "no batch"],
)
def test_runners_refuse_other_batches(batch: np.ndarray, bundle: Bundle) -> None:
    with OnnxRuntimeRunner(bundle) as runner, pytest.raises(InputError):
        runner.run(batch)


# ---- weights too large for a protobuf, in a file beside the graph ----------------------------------------------------


MODULE = "gmmvit_deploy.exporting.bundle_from_checkpoint"


@pytest.fixture(scope="module")
def large(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bundle]:
    """As ``bundle``, which is made first, as if its weights were too large for a protobuf."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "EXTERNAL_FROM_BYTES", 10_000)
        patch.setattr(weights, "_LARGE_BYTES", 1_000)
        path = tmp_path_factory.mktemp("large") / "bundle"
        yield bundle_from_checkpoint(GOLDEN / "vit_gmm.pth", path, cifar_options())


@pytest.mark.integration
def test_the_graph_is_the_same(large: Bundle, bundle: Bundle) -> None:
    assert set(large.manifest.files) == {*bundle.manifest.files, "model.onnx.data"}
    assert large.onnx_path.stat().st_size < bundle.onnx_path.stat().st_size // 2
    there, expected = (onnx.load(each.onnx_path).graph for each in (large, bundle))
    assert [*there.node] == [*expected.node]
    for tensor, same in zip(there.initializer, expected.initializer, strict=True):
        assert tensor.name == same.name
        np.testing.assert_array_equal(numpy_helper.to_array(tensor), numpy_helper.to_array(same))
    assert open_bundle(large.path) == large


@pytest.mark.integration
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.nightly
def test_the_other_precisions(large: Bundle, precision: str) -> None:
    variant = variant_from_bundle(large, precision)  # type: ignore[arg-type]
    assert (large.path / f"graphs/{precision}.onnx.data").is_file()
    assert variant.record is not None
    assert variant.record.golden["largest_rel"] < 0.1
    assert open_variant(large, precision) == variant  # type: ignore[arg-type]


@pytest.mark.integration
def test_parity_and_the_runtimes(large: Bundle, bundle: Bundle) -> None:
    inputs, logits = bundle.golden()
    with open_runners(["onnxruntime", "openvino"], large) as runners:
        for runner in runners:
            np.testing.assert_allclose(runner.run(inputs), logits, rtol=0, atol=1e-5)
        assert check_parity(large, runners, ParityOptions(localize=True)).verdict == "passed"


@pytest.mark.integration
@pytest.mark.parametrize("change", [lambda data: data[:-1] + b"x", lambda data: None], ids=["changed", "missing"])
def test_a_damaged_file_of_weights_is_refused(change, large: Bundle, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    content = {file.name: file.read_bytes() for file in large.path.iterdir() if file.is_file()}
    content["model.onnx.data"] = change(content["model.onnx.data"])
    for name, data in content.items():
        if data is not None:
            (tmp_path / name).write_bytes(data)
    with pytest.raises(BundleError, match=r"model\.onnx\.data"):
        open_bundle(tmp_path)


@pytest.mark.integration
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


@pytest.mark.integration
def test_an_export_that_does_not_fit_is_refused_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{MODULE}.weights_bytes", lambda checkpoint, weights: 2 * 2**30)
    monkeypatch.setattr(f"{MODULE}.available_bytes", lambda: 6 * 2**30)
    with pytest.raises(InputError, match=r"2\.00 GiB of weights takes about 8\.5 GiB of memory, and 6\.0 GiB are"):
        bundle_from_checkpoint(GOLDEN / "vit_gmm.pth", tmp_path / "bundle", cifar_options())
    assert list(tmp_path.iterdir()) == []
