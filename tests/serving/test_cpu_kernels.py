"""A served network runs with our kernels or without, as its repository states, and reports it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.errors import ServerError
from gmmvit_deploy.parity.inputs import fresh_inputs
from gmmvit_deploy.runtimes.runners.open import open_runner
from gmmvit_deploy.runtimes.runners.triton import TritonRunner
from gmmvit_deploy.serving.model_configs import RepositoryOptions
from gmmvit_deploy.serving.repository import repository_from_bundle
from gmmvit_deploy.serving.server import ServerOptions, TritonServer
from tests.conftest import FREE_PORTS

pytestmark = [pytest.mark.integration, pytest.mark.nightly]


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("mode", ["auto", "off"])
def test_settings_and_log_state_whether_the_kernels_run(
    runtime: Literal["onnxruntime", "openvino"], mode: Literal["auto", "off"], bundle: Bundle, tmp_path: Path
) -> None:
    options = RepositoryOptions(runtime=runtime, cpu_kernels=mode, threads=1, chunk=2 if mode == "auto" else 0)
    repository = repository_from_bundle(bundle, tmp_path / "models", options)
    used = repository.cpu_kernels.used
    assert mode == "auto" or not used
    log: list[str] = []
    with (
        TritonServer(repository.path, options=ServerOptions(**FREE_PORTS), on_log_line=log.append) as server,
        TritonRunner(bundle, server.grpc_url) as runner,
    ):
        stated = "on" if used else "off"
        assert runner.settings["cpu_kernels"] == runner.provenance()["cpu_kernels"] == stated
        assert runner.settings["chunk"] == str(options.chunk)
        inputs = fresh_inputs(bundle, 5)  # in chunks of 2, the last chunk has a single image
        with open_runner(runtime, bundle) as local:
            np.testing.assert_allclose(runner.run(inputs), local.run(inputs), atol=1e-5)
    assert any(f"cpu_kernels {stated}: attention is computed by" in line for line in log)


def test_a_server_without_the_kernels_that_its_config_states_does_not_start(bundle: Bundle, tmp_path: Path) -> None:
    repository = repository_from_bundle(bundle, tmp_path / "models", RepositoryOptions(runtime="openvino", threads=1))
    if not repository.cpu_kernels.used:
        pytest.skip(f"our kernels are not available here: {repository.cpu_kernels.why_not}")
    library = repository.path / "gmmvit_network" / "1" / "openvino_kernels.so"
    library.write_bytes(b"compiled for another machine")
    with pytest.raises(ServerError, match="cpu_kernels is on, and our kernels cannot run on this server") as caught:
        TritonServer(repository.path, options=ServerOptions(**FREE_PORTS)).start()
    assert library.name in str(caught.value)
    assert "--runner openvino to run without" in str(caught.value)


def test_a_network_with_other_outputs_than_pytorch_is_not_served(bundle: Bundle, tmp_path: Path) -> None:
    repository = repository_from_bundle(bundle, tmp_path / "models", RepositoryOptions(threads=1))
    golden = repository.path / "gmmvit_network" / "1" / "golden.npz"
    with np.load(golden) as stored:
        arrays = dict(stored)
    np.savez(golden, **{**arrays, "logits": arrays["logits"] + 1})
    with pytest.raises(ServerError, match=r"the network is wrong on this server: .* by 1; expected at most"):
        TritonServer(repository.path, options=ServerOptions(**FREE_PORTS)).start()
