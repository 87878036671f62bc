"""What Triton does without a gateway: it refuses a request that finds the queue full, or accepts and never answers."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.errors import OverloadError, ServerError
from gmmvit_deploy.runtimes.programs.triton import TritonConnection
from gmmvit_deploy.serving.repository import repository_from_bundle
from gmmvit_deploy.serving.server import ServerOptions, TritonServer
from tests.conftest import FREE_PORTS
from tests.serving.test_server import PROTOCOLS, url_of

SLOW = 255
"""A batch that begins with this pixel takes a second."""


def edited(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, text
    path.write_text(text.replace(old, new))


@pytest.fixture(scope="module")
def refusing(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A server whose network takes a second for a batch, and lets a single request wait."""
    folder = tmp_path_factory.mktemp("refusing")
    network = repository_from_bundle(bundle, folder / "models").path / "gmmvit_network"
    edited(
        network / "config.pbtxt",
        "dynamic_batching {",
        "dynamic_batching {\n  default_queue_policy {\n    max_queue_size: 1\n  }",
    )
    edited(
        network / "1" / "model.py",
        "        answers: list[Any] = [None] * len(requests)\n",
        "        answers: list[Any] = [None] * len(requests)\n"
        f"        if batches[0].flat[0] == {SLOW}:\n"
        '            __import__("time").sleep(1)\n',
    )
    with TritonServer(folder / "models", options=ServerOptions(**FREE_PORTS)) as running:
        yield running


@pytest.mark.nightly
@pytest.mark.integration
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_full_queue_is_no_missing_server(protocol: str, refusing: TritonServer) -> None:
    pixels = np.full((1, 32, 32, 3), SLOW, np.uint8)

    def ask(_: int) -> ServerError | None:
        try:
            connection.infer("gmmvit_network", "pixels", pixels)
        except ServerError as exc:
            return exc
        return None

    with TritonConnection(url_of(refusing, protocol), timeout_s=20) as connection:
        with ThreadPoolExecutor(max_workers=8) as pool:
            answers = list(pool.map(ask, range(8)))
        assert connection.infer("gmmvit_network", "pixels", pixels - 1).shape == (1, 10)
    refusals = [answer for answer in answers if answer is not None]
    assert 1 <= len(refusals) < 8
    for refusal in refusals:
        assert isinstance(refusal, OverloadError), refusal
        assert f"{connection.url} answers, but refuses requests for now" in str(refusal)


# ---- a server that accepts a connection and never answers ------------------------------------------------------------


CALLS: dict[str, Callable[[TritonConnection], object]] = {
    "configuration": lambda connection: connection.model("gmmvit"),
    "statistics": lambda connection: connection.timings("gmmvit"),
    "version": lambda connection: connection.version(),
    "inference": lambda connection: connection.infer("gmmvit", "PIXELS", np.zeros((1, 2), np.uint8)),
}


@pytest.fixture
def silent_address() -> Iterator[str]:
    """Yield ``host:port`` of a socket that accepts connections and sends nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.first(2)
@pytest.mark.timeout(45)  # without a limit of its own, a call takes 60 s
@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_a_silent_server_ends_the_call(
    silent_address: str, protocol: str, call: Callable[[TritonConnection], object]
) -> None:
    url = f"{protocol}://{silent_address}"
    message = f"{silent_address}: (no answer within 0.3 s|timed out)"
    with TritonConnection(url, timeout_s=0.3) as connection, pytest.raises(ServerError, match=message):
        call(connection)
