"""A network that is wrong on a server is not served: it, or the server, compares it with the reference outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from gmmvit_deploy.bundle.artifacts import GOLDEN_FILE, Bundle
from gmmvit_deploy.errors import RepositoryError, ServerError
from gmmvit_deploy.inference.openvino_program import CHUNK
from gmmvit_deploy.inference.runner_name import RunnerName
from gmmvit_deploy.runtimes.runners.triton import TritonRunner
from gmmvit_deploy.serving.options import RepositoryOptions
from gmmvit_deploy.serving.repository import repository_from_bundle
from gmmvit_deploy.serving.served_models import read_models
from gmmvit_deploy.serving.server import ServerOptions, TritonServer
from tests.conftest import FREE_PORTS

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
