"""``gmmvit serve --gateway`` for repositories that `gmmvit serve` does not write itself."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gmmvit_deploy.artifacts import Bundle
from gmmvit_deploy.serving.gateway.options import GatewaySettings
from gmmvit_deploy.serving.model_configs import RepositoryOptions
from gmmvit_deploy.serving.repository import repository_from_bundle
from gmmvit_deploy.serving.server import ServerOptions, TritonServer
from gmmvit_deploy.serving.service import GatewayService
from tests.conftest import FREE_PORTS
from tests.serving.conftest import flat_png
from tests.serving.gateways import key_file, request, require_haproxy

pytestmark = [pytest.mark.server, pytest.mark.export]


@pytest.mark.parametrize(("name", "normalised"), [("cifar", True), ("gmmvit", False)])
def test_the_front_asks_the_ensemble_of_the_repository_if_there_is_an_ensemble(
    name: str, normalised: bool, bundle: Bundle, tensor_bundles: dict[str, Bundle], tmp_path: Path
) -> None:
    require_haproxy()
    served = bundle if normalised else tensor_bundles["vit_gmm"]
    repository = repository_from_bundle(served, tmp_path / "models", RepositoryOptions(name=name))
    lines: list[str] = []
    settings = GatewaySettings(keys=key_file(tmp_path), access_log=tmp_path / "access.log")
    with GatewayService(ServerOptions(**FREE_PORTS), settings, on_gateway_line=lines.append) as service:
        server = TritonServer(repository.path, options=service.server_options)
        service.start(server, cancelled=lambda: False)
        images = served.golden_set().images
        answer = request(
            service.http_url, "/classify", images[0] if images else b"image", headers={"Content-Type": "image/png"}
        )
    if normalised:
        assert (answer.status, answer.json()["model"]) == (200, name)
    else:
        assert answer.status == 404
        assert "front: POST /classify is not offered: no model of the repository takes encoded images" in lines


def test_images_to_classify_wait_in_the_queue_of_the_gateway(bundle: Bundle, tmp_path: Path) -> None:
    """A request in flight and a waiting request: four others are refused, long before the timeout of the queue."""
    require_haproxy()
    repository = repository_from_bundle(bundle, tmp_path / "models")
    log = tmp_path / "access.log"
    settings = GatewaySettings(
        keys=key_file(tmp_path), access_log=log, in_flight=1, queue_limit=1, queue_timeout_ms=30_000
    )
    image = flat_png(7000, 7000)

    def ask(_: int) -> tuple[int, float]:
        started = time.monotonic()
        return request(service.http_url, "/classify", image).status, time.monotonic() - started

    with GatewayService(ServerOptions(**FREE_PORTS), settings) as service, ThreadPoolExecutor(6) as pool:
        service.start(TritonServer(repository.path, options=service.server_options), cancelled=lambda: False)
        answers = sorted(pool.map(ask, range(6)))
    assert [status for status, _ in answers] == [200, 200, 503, 503, 503, 503]
    assert max(seconds for _, seconds in answers[2:]) < min(seconds for _, seconds in answers[:2])
    assert {json.loads(line)["model"] for line in log.read_text().splitlines()} == {"gmmvit"}


def test_a_second_signal_before_the_start_kills_nothing(tmp_path: Path) -> None:
    require_haproxy()
    with GatewayService(ServerOptions(**FREE_PORTS), GatewaySettings(keys=key_file(tmp_path))) as service:
        service.kill_now()
