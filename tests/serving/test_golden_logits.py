"""A real Triton server with a golden checkpoint of each family gives the golden logits over gRPC and HTTP.

The float64 logits of the training code, which newer golden files have, are the reference for parity's limit.
The server starts once, with the models of the run's tests. tests/timm/test_to_triton.py serves the models that timm
builds.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.runtimes.runners.triton import TritonRunner
from gmmvit_deploy.serving.server import ServerOptions, TritonServer
from tests.conftest import EACH_FAMILY, FREE_PORTS, LATER, MANIFEST, golden
from tests.serving.conftest import joined_repository
from tests.serving.test_server import PROTOCOLS, url_of

pytestmark = [pytest.mark.integration, pytest.mark.nightly]
SERVED = [name for name in EACH_FAMILY if MANIFEST[name]["family"] != "timm"]


@pytest.fixture(scope="module")
def golden_server(
    request: pytest.FixtureRequest, tensor_bundles: dict[str, Bundle], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    """A server with the golden checkpoints of the tests of this run."""
    asked = {item.callspec.params["name"] for item in request.session.items if item.path == request.path}
    served = {name: tensor_bundles[name] for name in SERVED if name in asked}
    models = joined_repository(tmp_path_factory.mktemp("golden"), served, threads=1)
    with TritonServer(models, options=ServerOptions(**FREE_PORTS)) as running:
        yield running


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", SERVED)
def test_golden_logits(
    name: str, protocol: str, golden_server: TritonServer, tensor_bundles: dict[str, Bundle]
) -> None:
    case = golden(name)
    with TritonRunner(tensor_bundles[name], url_of(golden_server, protocol), model=name) as runner:
        for batch in (1, 2, 5, 8):
            rows = np.arange(batch) % len(case.inputs)
            logits = runner.run(case.inputs[rows])
            np.testing.assert_allclose(logits, case.logits[rows], rtol=0, atol=case.atol)
            if name in LATER:
                np.testing.assert_allclose(logits, case.exact[rows], rtol=0, atol=case.limit())
