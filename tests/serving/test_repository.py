from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

import gmmvit_deploy.preprocess
from gmmvit_deploy.artifacts import Bundle
from gmmvit_deploy.errors import InputError, OutputError, RepositoryError
from gmmvit_deploy.preprocess import pixels_from_bytes
from gmmvit_deploy.serving.model_configs import RepositoryOptions
from gmmvit_deploy.serving.repository import repository_from_bundle


def config(path: Path) -> model_config_pb2.ModelConfig:
    """Parsed by protobuf itself: an unknown field or value would raise."""
    return text_format.Parse(path.read_text(), model_config_pb2.ModelConfig())


@pytest.mark.parametrize("backend", ["python", "onnxruntime", "tensorrt"])
def test_every_backend_gives_three_models(backend: str, bundle: Bundle, tmp_path: Path) -> None:
    engine = tmp_path / "model.plan"
    engine.write_bytes(b"a plan")
    options = RepositoryOptions(backend=backend, name="m")
    written = repository_from_bundle(bundle, tmp_path / "r", options, engine=engine if backend == "tensorrt" else None)
    assert written.models == ("m", "m_network", "m_preprocess")
    network = config(tmp_path / "r" / "m_network" / "config.pbtxt")
    assert (network.backend, network.max_batch_size) == (backend, 8)
    assert network.HasField("dynamic_batching")
    assert [sample.batch_size for sample in network.model_warmup] == [1, 8]
    expected = {"python": {"model.py", "model.onnx"}, "onnxruntime": {"model.onnx"}, "tensorrt": {"model.plan"}}
    assert {file.name for file in (tmp_path / "r" / "m_network" / "1").iterdir()} == expected[backend]
    gpu = model_config_pb2.ModelInstanceGroup.KIND_GPU
    assert (network.instance_group[0].kind == gpu) == (backend == "tensorrt")


def test_configurations_fit_together(bundle: Bundle, tmp_path: Path) -> None:
    repository_from_bundle(bundle, tmp_path / "r")
    ensemble, preprocess, network = (
        config(tmp_path / "r" / name / "config.pbtxt") for name in ("gmmvit", "gmmvit_preprocess", "gmmvit_network")
    )
    assert ensemble.platform == "ensemble"
    assert [step.model_name for step in ensemble.ensemble_scheduling.step] == ["gmmvit_preprocess", "gmmvit_network"]
    assert preprocess.output[0] == model_config_pb2.ModelOutput(
        name="pixels", data_type=model_config_pb2.TYPE_UINT8, dims=[32, 32, 3]
    )
    assert list(network.input[0].dims) == list(preprocess.output[0].dims)
    assert (ensemble.output[0].name, list(ensemble.output[0].dims)) == ("logits", [10])
    for model in (ensemble, network):
        assert model.output[0].label_filename == "labels.txt"
        labels = (tmp_path / "r" / model.name / "labels.txt").read_text().splitlines()
        assert labels == json.loads(model.parameters["gmmvit_labels"].string_value) == list(bundle.manifest.labels)
        assert model.parameters["gmmvit_bundle_sha256"].string_value == bundle.sha256


def test_server_decodes_with_our_own_preprocessing(bundle: Bundle, tmp_path: Path) -> None:
    repository_from_bundle(bundle, tmp_path / "r")
    copied = tmp_path / "r" / "gmmvit_preprocess" / "1" / "gmmvit_preprocess.py"
    assert copied.read_bytes() == Path(gmmvit_deploy.preprocess.__file__).read_bytes()


def test_warmup_image_is_one_that_decodes(bundle: Bundle, tmp_path: Path) -> None:
    repository_from_bundle(bundle, tmp_path / "r")
    data = (tmp_path / "r" / "gmmvit_preprocess" / "warmup" / "image").read_bytes()
    assert struct.unpack("<I", data[:4])[0] == len(data) - 4
    assert pixels_from_bytes(data[4:], 32).shape == (32, 32, 3)


def test_without_normalisation_there_is_only_the_network(tensor_bundles: dict[str, Bundle], tmp_path: Path) -> None:
    written = repository_from_bundle(tensor_bundles["vit_gmm"], tmp_path / "r")
    assert written.models == ("gmmvit_network",)
    assert "how they are normalised" in written.skipped[0]
    assert [folder.name for folder in (tmp_path / "r").iterdir()] == ["gmmvit_network"]


def test_tensorrt_without_an_engine_says_how_to_build_one(bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(RepositoryError, match="needs an engine") as caught:
        repository_from_bundle(bundle, tmp_path / "r", RepositoryOptions(backend="tensorrt"))
    assert "--minShapes=pixels:1x32x32x3" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("engine", ["absent", "empty"])
def test_tensorrt_with_no_real_engine(engine: str, bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(RepositoryError, match="an empty one"):
        repository_from_bundle(bundle, tmp_path / "r", RepositoryOptions(backend="tensorrt"), engine=tmp_path / engine)


def test_an_engine_goes_with_tensorrt_only(bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(RepositoryError, match="goes with --backend tensorrt"):
        repository_from_bundle(bundle, tmp_path / "r", engine=tmp_path / "x.plan")


def test_existing_folder_is_kept(bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    with pytest.raises(OutputError, match="exists"):
        repository_from_bundle(bundle, tmp_path / "r")
    assert list((tmp_path / "r").iterdir()) == []


@pytest.mark.parametrize(
    "options",
    [{"backend": "pytorch"}, {"name": "a b"}, {"name": "../x"}, {"name": ""}, {"instances": 0}, {"threads": -1}],
    ids=str,
)
def test_options_that_cannot_be(options: dict[str, object]) -> None:
    with pytest.raises(InputError):
        RepositoryOptions(**options)


def test_the_committed_repository_is_what_we_write(tmp_path: Path, bundle: Bundle) -> None:
    """``model_repository/`` shows the demo's models; only hashes, sizes and weights may differ."""
    committed = Path(__file__).parents[2] / "model_repository"
    repository_from_bundle(bundle, tmp_path / "r")
    written = {path.relative_to(tmp_path / "r") for path in (tmp_path / "r").rglob("*") if path.is_file()}
    there = {path.relative_to(committed) for path in committed.rglob("*") if path.is_file()}
    weights = Path("gmmvit_network/1/model.onnx")
    assert there - {Path("README.md")} == written - {weights}
    for relative in sorted(there - {Path("README.md")}):
        if relative.suffix == ".py":
            assert (committed / relative).read_text() == (tmp_path / "r" / relative).read_text(), relative
        if relative.name == "config.pbtxt":
            ours, theirs = config(tmp_path / "r" / relative), config(committed / relative)
            for model in (ours, theirs):
                model.max_batch_size = 0
                model.parameters.clear()
                for sample in model.model_warmup:
                    sample.batch_size, sample.name = 0, ""
            assert ours == theirs, relative


def test_a_damaged_bundle_is_not_served(bundle: Bundle, tmp_path: Path, gmmvit) -> None:
    path = tmp_path / "bundle"
    shutil.copytree(bundle.path, path)
    (path / "model.onnx").write_bytes(b"something else")
    answer = gmmvit("repository", path, "-o", tmp_path / "r")
    assert answer.returncode == 1
    assert "its SHA-256 is" in answer.stderr
    assert not (tmp_path / "r").exists()
