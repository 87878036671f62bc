"""The network of a real server: what runs it, with our kernels or without, and what happens when it is wrong there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from gmmvit_deploy.bundle.artifacts import GOLDEN_FILE, Bundle
from gmmvit_deploy.errors import RepositoryError, ServerError
from gmmvit_deploy.exporting.golden import fresh_inputs
from gmmvit_deploy.images.spec import ImageSpec
from gmmvit_deploy.inference.openvino_program import CHUNK
from gmmvit_deploy.inference.runner_name import RunnerName
from gmmvit_deploy.runtimes.programs.openvino import our_kernels
from gmmvit_deploy.runtimes.programs.triton import TritonConnection
from gmmvit_deploy.runtimes.runners.open import open_runner
from gmmvit_deploy.runtimes.runners.triton import TritonRunner
from gmmvit_deploy.serving.model_configs import model_configs
from gmmvit_deploy.serving.options import RepositoryOptions
from gmmvit_deploy.serving.repository import repository_from_bundle
from gmmvit_deploy.serving.served_models import read_models
from gmmvit_deploy.serving.server import ServerOptions, TritonServer
from tests.conftest import FREE_PORTS
from tests.export.test_channels import SPEC, exported
from tests.inference.test_preprocess import encoded, photo
from tests.inference.test_timm_preprocess import by_timm
from tests.serving.conftest import joined_repository

pytestmark = [pytest.mark.integration, pytest.mark.nightly]

_BACKEND = """import onnxruntime
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.session = onnxruntime.InferenceSession(__file__.replace("model.py", "model.onnx"))

    def execute(self, requests):
        return [self.answer(pb_utils.get_input_tensor_by_name(request, "pixels").as_numpy()) for request in requests]

    def answer(self, pixels):
        (logits,) = self.session.run(None, {"pixels": pixels})
        return pb_utils.InferenceResponse([pb_utils.Tensor("logits", logits)])
"""
"""Runs a graph as Triton's ONNX Runtime backend does, which the server of the wheel lacks."""


def served(repository: Path, limits: Mapping[str, Mapping[str, float]]) -> TritonServer:
    """Return a server that compares the network, although the configuration states a backend that compares itself."""
    server = TritonServer(repository, options=ServerOptions(**FREE_PORTS))
    server.models = replace(server.models, limits=limits)
    return server


def repository_of(bundle: Bundle, folder: Path) -> Mapping[str, Mapping[str, float]]:
    """Write a repository for the ONNX Runtime backend, run by `_BACKEND`; return the limits that it states."""
    repository_from_bundle(bundle, folder, RepositoryOptions(backend="onnxruntime"))
    limits = read_models(folder).limits
    assert list(limits) == ["gmmvit_network"]
    config = folder / "gmmvit_network" / "config.pbtxt"
    text = config.read_text(encoding="utf-8")
    assert 'backend: "onnxruntime"' in text
    config.write_text(text.replace('backend: "onnxruntime"', 'backend: "python"'), encoding="utf-8")
    (folder / "gmmvit_network" / "1" / "model.py").write_text(_BACKEND, encoding="utf-8")
    return limits


def change_head(graph: Path) -> None:
    """Add 0.01 to each logit's bias."""
    proto = onnx.load(graph)
    (bias,) = (tensor for tensor in proto.graph.initializer if tensor.name.endswith("head.bias"))
    bias.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(bias) + np.float32(0.01), bias.name))
    onnx.save(proto, graph)


def test_a_wrong_network_ends_the_start(bundle: Bundle, tmp_path: Path) -> None:
    repository = tmp_path / "models"
    limits, files = repository_of(bundle, repository), repository / "gmmvit_network" / "1"
    with served(repository, limits) as server, TritonRunner(bundle, server.grpc_url) as runner:
        runner.run(bundle.golden()[0])
    change_head(files / "model.onnx")
    with pytest.raises(
        ServerError,
        match=r"gmmvit_network is wrong on this server: on the reference inputs, in a batch of 1, the logits differ "
        r"from PyTorch's by 0\.01; expected at most ",
    ) as error:
        served(repository, limits).start()
    assert "type --runner with another runner" in error.value.hint
    (files / GOLDEN_FILE).unlink()
    with pytest.raises(RepositoryError, match="expected the reference outputs of gmmvit_network") as missing:
        served(repository, limits).start()
    assert "type gmmvit repository BUNDLE" in missing.value.hint


@pytest.mark.parametrize(("first", "size"), [(0, 1), (1, CHUNK)], ids=["for an image", "only for a batch"])
def test_a_network_with_other_outputs_than_pytorch_is_not_served(
    first: int, size: int, bundle: Bundle, tmp_path: Path
) -> None:
    repository = repository_from_bundle(
        bundle, tmp_path / "models", RepositoryOptions(runner=RunnerName("openvino"), threads=1)
    )
    golden = repository.path / "gmmvit_network" / "1" / "golden.npz"
    with np.load(golden) as stored:
        arrays = dict(stored)
    arrays["logits"][first:] += 1
    np.savez(golden, **arrays)
    with pytest.raises(ServerError, match=rf"wrong on this server: .* in a batch of {size}, .* by 1; expected at most"):
        TritonServer(repository.path, options=ServerOptions(**FREE_PORTS)).start()


# ---- our kernels -----------------------------------------------------------------------------------------------------


needs_kernel = pytest.mark.skipif(our_kernels("fp32")[0] is None, reason="our kernels are not available here")


@pytest.mark.parametrize(
    ("name", "by"),
    [
        ("onnxruntime", "ONNX Runtime"),
        ("openvino", "OpenVINO"),
        pytest.param("openvino+kernels", "our kernels", marks=needs_kernel),
    ],
)
def test_settings_and_log_state_whether_the_kernels_run(name: str, by: str, bundle: Bundle, tmp_path: Path) -> None:
    options = RepositoryOptions(runner=RunnerName.parse(name), threads=1)
    repository = repository_from_bundle(bundle, tmp_path / "models", options)
    log: list[str] = []
    with (
        TritonServer(repository.path, options=ServerOptions(**FREE_PORTS), on_log_line=log.append) as server,
        TritonRunner(bundle, server.grpc_url) as runner,
    ):
        assert runner.settings["runner"] == runner.provenance()["runner"] == name
        inputs = fresh_inputs(bundle, 5)
        with open_runner(name, bundle) as local:
            np.testing.assert_allclose(runner.run(inputs), local.run(inputs), atol=1e-5)
    assert any(f"attention is computed by {by}" in line for line in log)


@needs_kernel
def test_a_server_without_the_kernels_that_its_config_states_does_not_start(bundle: Bundle, tmp_path: Path) -> None:
    options = RepositoryOptions(runner=RunnerName("openvino", kernels=True), threads=1)
    repository = repository_from_bundle(bundle, tmp_path / "models", options)
    library = repository.path / "gmmvit_network" / "1" / "openvino_kernels.so"
    library.write_bytes(b"compiled for another machine")
    with pytest.raises(ServerError, match=r"runner openvino\+kernels: our kernels cannot run on this server") as caught:
        TritonServer(repository.path, options=ServerOptions(**FREE_PORTS)).start()
    assert library.name in str(caught.value)
    assert "--runner openvino to run without" in str(caught.value)


# ---- images that are cropped and not square --------------------------------------------------------------------------


IMAGES = [photo(51, 37), photo(20, 64, "L"), photo(33, 33), photo(11, 15)]
FILES = [encoded(image, "PNG") for image in IMAGES]
WIDE = ImageSpec(
    height=20, width=33, channels=3, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4), resize="center-bicubic", crop_pct=0.9
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WideSpec(type(SPEC)):  # type: ignore[misc]
    """The spec of a model that takes images of 20×33 pixels."""

    @property
    def image_shape(self) -> tuple[int, int]:
        return (20, 33)


def wide(bundle: Bundle, image: ImageSpec) -> Bundle:
    """Return the bundle, described as if the network took images that are not square."""
    values = {field.name: getattr(bundle.manifest.spec, field.name) for field in fields(bundle.manifest.spec)}
    spec = WideSpec(**{**values, "channels": image.channels})
    return replace(bundle, manifest=replace(bundle.manifest, spec=spec, image=image))


@pytest.fixture(scope="module")
def wide_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return wide(exported(tmp_path_factory.mktemp("wide"), 3), WIDE)


@pytest.fixture(scope="module")
def wide_server(wide_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A server with the preprocessing model of a network that is not square."""
    models = joined_repository(
        tmp_path_factory.mktemp("crops"), {"wide": wide_bundle}, threads=1, runner=RunnerName("openvino")
    )
    for model in models.glob("wide*"):
        if model.name != "wide_preprocess":
            shutil.rmtree(model)
    with TritonServer(models, options=ServerOptions(**FREE_PORTS)) as running:
        yield running


def test_server_preprocesses_images_for_a_network_that_is_not_square(wide_server: TritonServer) -> None:
    images = np.array([[file] for file in FILES], dtype=np.object_)
    with TritonConnection(wide_server.grpc_url) as connection:
        pixels = connection.infer("wide_preprocess", "IMAGE", images, output="pixels")
    assert pixels.shape == (4, 20, 33, 3)
    np.testing.assert_array_equal(pixels, np.stack([by_timm(image, WIDE)[0] for image in IMAGES]))


def test_configurations_of_a_network_that_is_not_square(wide_bundle: Bundle, tmp_path: Path) -> None:
    of_tensors = wide(exported(tmp_path, 3, input_kind="tensor"), WIDE)
    for made, shape in ((wide_bundle, [20, 33, 3]), (of_tensors, [3, 20, 33])):
        configs = model_configs(made, RepositoryOptions(runner=RunnerName("openvino")))
        assert list(configs["gmmvit_network"].input[0].dims) == shape
        assert list(configs["gmmvit_preprocess"].output[0].dims) == shape
        settings = json.loads(configs["gmmvit_preprocess"].parameters["preprocessing"].string_value)
        assert settings == {**WIDE.to_json(), "threads": 0}
        assert (settings["height"], settings["width"], settings["crop_pct"]) == (20, 33, 0.9)
