"""Orders over the socket of a state folder."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gmmvit_deploy.errors import ServerError
from gmmvit_deploy.serving.rollout._state import State
from gmmvit_deploy.serving.rollout.control import ControlServer, Send, send_order


def count(order: dict[str, Any], send: Send) -> Mapping[str, Any]:
    for step in range(int(order["to"])):
        send({"step": str(step)})
    return {"done": "counted"}


def crash(order: dict[str, Any], send: Send) -> Mapping[str, Any]:
    raise KeyError("boom")


@pytest.fixture
def state(tmp_path: Path) -> State:
    return State(tmp_path)


def test_an_unexpected_error_ends_the_order_and_not_the_service(state: State) -> None:
    with ControlServer(state, {"crash": crash, "count": count}):
        (event,) = send_order(state.folder, {"order": "crash"})
        assert "unexpected KeyError" in event["error"]
        assert list(send_order(state.folder, {"order": "count", "to": 0})) == [{"done": "counted"}]


@pytest.mark.parametrize("sent", [b"not json\n", b"[]\n", b"x" * 70000, b""])
def test_what_is_no_order_is_refused(state: State, sent: bytes) -> None:
    with ControlServer(state, {}), socket.socket(socket.AF_UNIX) as client:
        client.settimeout(10)
        client.connect(str(state.socket_path))
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        assert b"expected an order" in client.recv(4096)


def test_without_a_service_the_error_states_how_to_start_it(state: State) -> None:
    with pytest.raises(ServerError, match="no service with this state folder is running") as caught:
        list(send_order(state.folder, {"order": "status"}))
    assert caught.value.hint.startswith("type gmmvit serve BUNDLE --gateway --keys FILE --state")
    state.record_path.write_text("{}")
    with pytest.raises(ServerError) as caught:
        list(send_order(state.folder, {"order": "status"}))
    assert caught.value.hint.startswith("type gmmvit serve --gateway --keys FILE --state")


def test_a_service_that_ends_in_the_middle_is_an_error(state: State) -> None:
    with socket.socket(socket.AF_UNIX) as service:
        service.bind(str(state.socket_path))
        service.listen()

        def answer_half() -> None:
            connection, _ = service.accept()
            connection.recv(100)
            connection.sendall(b'{"step": "begins"}\n')
            connection.close()

        thread = threading.Thread(target=answer_half)
        thread.start()
        with pytest.raises(ServerError, match="ended before the order was complete"):
            list(send_order(state.folder, {"order": "status"}))
        thread.join()


def test_the_socket_is_for_its_owner_alone(state: State) -> None:
    with ControlServer(state, {}):
        assert state.socket_path.stat().st_mode & 0o077 == 0
    assert not state.socket_path.exists()
