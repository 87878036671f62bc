"""A served network runs with our kernels or without, as its repository states, and reports it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.errors import ServerError
from gmmvit_deploy.exporting.golden import fresh_inputs
from gmmvit_deploy.inference.runner_name import RunnerName
from gmmvit_deploy.runtimes.programs.openvino import our_kernels
from gmmvit_deploy.runtimes.runners.open import open_runner
from gmmvit_deploy.runtimes.runners.triton import TritonRunner
from gmmvit_deploy.serving.options import RepositoryOptions
from gmmvit_deploy.serving.repository import repository_from_bundle
from gmmvit_deploy.serving.server import ServerOptions, TritonServer
from tests.conftest import FREE_PORTS

pytestmark = [pytest.mark.integration, pytest.mark.nightly]


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
