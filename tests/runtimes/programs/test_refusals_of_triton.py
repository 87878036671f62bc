"""What Triton itself refuses without a gateway: a request that finds the queue full."""

from __future__ import annotations

from collections.abc import Iterator
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

pytestmark = [pytest.mark.integration, pytest.mark.nightly]
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
