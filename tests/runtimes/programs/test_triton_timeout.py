"""A server that accepts a connection and never answers ends every call after the time limit, over both protocols."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from gmmvit_deploy.errors import ServerError
from gmmvit_deploy.runtimes.programs.triton import TritonConnection

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
