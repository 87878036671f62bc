"""A served network runs with our kernels or without, as its repository was written, and says which."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from gmmvit_deploy.artifacts import Bundle
from gmmvit_deploy.parity.inputs import fresh_inputs
from gmmvit_deploy.runners.triton import TritonRunner
from gmmvit_deploy.serving.model_configs import RepositoryOptions
from gmmvit_deploy.serving.repository import repository_from_bundle
from gmmvit_deploy.serving.server import ServerOptions, TritonServer
from tests.conftest import FREE_PORTS

pytestmark = pytest.mark.server


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("mode", ["auto", "off"])
def test_settings_and_log_say_which(
    runtime: Literal["onnxruntime", "openvino"], mode: Literal["auto", "off"], bundle: Bundle, tmp_path: Path
) -> None:
    options = RepositoryOptions(runtime=runtime, cpu_kernels=mode, threads=1)
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
        assert runner.run(fresh_inputs(bundle, 3)).shape == (3, 10)
    assert any(f"cpu_kernels {stated}: attention is computed by" in line for line in log)
    assert not any("not by the faster kernel of our own" in line for line in log)
