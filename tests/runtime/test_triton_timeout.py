"""A server that accepts a connection and never answers ends every call after the time limit, over both protocols."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from gmmvit_deploy.errors import ServerError
from gmmvit_deploy.runtime.triton import TritonConnection

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


@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_a_silent_server_ends_the_call(
    silent_address: str, protocol: str, call: Callable[[TritonConnection], object]
) -> None:
    started = time.monotonic()
    url = f"{protocol}://{silent_address}"
    with TritonConnection(url, timeout_s=0.3) as connection, pytest.raises(ServerError, match=silent_address):
        call(connection)
    assert time.monotonic() - started < 10  # the default limit is 60 s
