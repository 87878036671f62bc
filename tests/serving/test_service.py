"""``gmmvit serve --gateway`` for repositories that `gmmvit serve` does not write itself."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.serving.gateway.options import GatewaySettings
from gmmvit_deploy.serving.options import RepositoryOptions
from gmmvit_deploy.serving.repository import repository_from_bundle
from gmmvit_deploy.serving.server import ServerOptions
from gmmvit_deploy.serving.service import Service
from tests.conftest import FREE_PORTS
from tests.haproxy import needs_haproxy
from tests.inference.test_preprocess import encoded, photo
from tests.serving.commands import metric_values
from tests.serving.gateways import key_file, request, running_service
from tests.serving.stand_in import answers_held, held_file
from tests.waiting import wait_until

pytestmark = [needs_haproxy, pytest.mark.integration, pytest.mark.nightly]


@pytest.mark.parametrize(("name", "normalised"), [("cifar", True), ("gmmvit", False)])
def test_the_front_asks_the_ensemble_of_the_repository_if_there_is_an_ensemble(
    name: str, normalised: bool, bundle: Bundle, tensor_bundles: dict[str, Bundle], tmp_path: Path
) -> None:
    served = bundle if normalised else tensor_bundles["vit_gmm"]
    repository = repository_from_bundle(served, tmp_path / "models", RepositoryOptions(name=name))
    lines: list[str] = []
    with running_service(repository.path, tmp_path, on_line=lines.append) as service:
        images = served.golden_set().images
        answer = request(
            service.http_url, "/classify", images[0] if images else b"image", headers={"Content-Type": "image/png"}
        )
    if normalised:
        assert (answer.status, answer.json()["model"]) == (200, name)
    else:
        assert answer.status == 404
        assert (
            "HTTP endpoint: POST /classify and /embed are not offered: no model of the repository takes encoded images"
            in lines
        )


def hold_answers(repository: Path) -> None:
    """Let the network of a repository wait inside ``with answers_held(repository):``."""
    program = repository / "gmmvit_network" / "1" / "model.py"
    old = "        answers: list[Any] = [None] * len(requests)\n"
    text = program.read_text()
    assert text.count(old) == 1
    wait = f"        while __import__('os').path.exists({str(held_file(repository))!r}):\n"
    program.write_text(text.replace(old, f"{old}{wait}            __import__('time').sleep(0.01)\n"))


def test_images_to_classify_wait_in_the_queue_of_the_gateway(bundle: Bundle, tmp_path: Path) -> None:
    """A request in flight and a waiting request: others are refused at once, while both have no answer."""
    repository = repository_from_bundle(bundle, tmp_path / "models")
    hold_answers(repository.path)
    queue = {"in_flight": 1, "queue_limit": 1, "queue_timeout_ms": 60_000}
    image = encoded(photo(32, 32), "PNG")

    def ask() -> int:
        return request(service.http_url, "/classify", image).status

    def count() -> float:
        return metric_values(service.metrics_url, "haproxy_backend_current_sessions").get('{proxy="front"}', 0)

    with running_service(repository.path, tmp_path, **queue) as service, ThreadPoolExecutor(2) as pool:
        with answers_held(repository.path):
            taken = []
            for number in (1, 2):
                taken.append(pool.submit(ask))
                wait_until(lambda number=number: count() == number, f"{number} requests in the gateway")
            assert [ask() for _ in range(4)] == [503] * 4
            assert not any(future.done() for future in taken)
        assert [future.result() for future in taken] == [200, 200]
    assert {json.loads(line)["model"] for line in (tmp_path / "access.log").read_text().splitlines()} == {"gmmvit"}


def test_a_second_signal_before_the_start_kills_nothing(tmp_path: Path) -> None:
    with Service(ServerOptions(**FREE_PORTS), GatewaySettings(keys=key_file(tmp_path))) as service:
        service.kill_now()
