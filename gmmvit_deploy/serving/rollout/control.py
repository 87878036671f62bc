"""Orders to a running service, over the socket in its state folder.

The client sends a line of JSON, an order. The service answers with lines of JSON, events, and closes the connection:

    {"order": "rollout", "bundle": PATH, …}    → {"step": TEXT} …, then {"done": TEXT} or {"error": TEXT, "hint": TEXT}
    {"order": "abort"}                         → {"done": TEXT} or {"error": …}
    {"order": "status"}                        → {"done": TEXT, "status": {…}}

Only users who may write into the state folder can connect (mode 0600).
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gmmvit_deploy.errors import GmmvitError, InputError, ServerError
from gmmvit_deploy.serving.rollout._state import State, socket_address

Send = Callable[[Mapping[str, Any]], None]
"""Sends an event to the client; a client that is gone is ignored."""
_MAX_ORDER_BYTES = 1 << 24  # paths of more than 100,000 images
_TIMEOUT_S = 5.0


def send_order(folder: Path, order: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Send an order to the service of a state folder, and yield the events of its answer.

    Errors: InputError for another folder. ServerError when no service answers, or it ends before its last event.
    """
    state = State(folder)
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as connection:
        try:
            connection.connect(socket_address(state.socket_path))
        except OSError as exc:
            raise _no_service(state, exc) from exc
        connection.sendall(json.dumps(dict(order)).encode() + b"\n")
        last: dict[str, Any] = {}
        with connection.makefile("r", encoding="utf-8") as lines:
            for line in lines:
                last = json.loads(line)
                yield last
    if not last.keys() & {"done", "error"}:
        raise ServerError(
            f"{folder}: the service ended before the order was complete",
            hint=f"type gmmvit rollout --status --to {folder} after the service has started again",
        )


class ControlServer:
    """Takes orders on the socket of a state folder, in threads of its own.

    handlers: name of an order → function that carries the order out; it sends events and returns the last event.
    """

    def __init__(
        self, state: State, handlers: Mapping[str, Callable[[dict[str, Any], Send], Mapping[str, Any]]]
    ) -> None:
        self._state = state
        self._handlers = handlers
        self._socket: socket.socket | None = None
        self._accepting: threading.Thread | None = None

    def __enter__(self) -> ControlServer:
        path = self._state.socket_path
        path.unlink(missing_ok=True)  # the state's lock is held, so the socket belongs to a service that has ended
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(socket_address(path))
        path.chmod(0o600)
        self._socket.listen()
        self._accepting = threading.Thread(target=self._accept, args=(self._socket,), daemon=True)
        self._accepting.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes accept(), which close() alone does not
            self._socket.close()
        if self._accepting is not None:
            self._accepting.join(timeout=_TIMEOUT_S)
        self._state.socket_path.unlink(missing_ok=True)

    def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        def send(event: Mapping[str, Any]) -> None:
            with contextlib.suppress(OSError):  # an order goes on if its client is gone
                connection.sendall(json.dumps(dict(event)).encode() + b"\n")

        with connection:
            connection.settimeout(_TIMEOUT_S)
            try:
                order = _order_from(connection)
                handler = self._handlers.get(str(order.get("order")))
                if handler is None:
                    raise ServerError(f"order {order.get('order')!r} is not known")
                send(handler(order, send))
            except GmmvitError as exc:
                send({"error": str(exc), "hint": exc.hint})
            except Exception as exc:  # the service goes on, and the client learns what happened
                send({"error": f"unexpected {type(exc).__name__}: {exc}", "hint": "see the service's log"})


def _no_service(state: State, reason: OSError) -> GmmvitError:
    with contextlib.suppress(OSError):
        if foreign := state.foreign_content():
            return InputError(
                f"--to {state.folder}: expected the state folder of a service, got {foreign}",
                hint="type --to with the folder that gmmvit serve has as --state",
            )
    bundle = "" if state.record_path.exists() else "BUNDLE "
    return ServerError(
        f"{state.folder}: no service with this state folder is running ({reason.strerror})",
        hint=f"type gmmvit serve {bundle}--gateway --keys FILE --state {state.folder} to start the service",
    )


def _order_from(connection: socket.socket) -> dict[str, Any]:
    try:
        with connection.makefile("rb") as lines:
            order = json.loads(lines.readline(_MAX_ORDER_BYTES))
    except (OSError, ValueError) as exc:  # OSError: no line within the timeout
        raise ServerError(f"expected an order: a line of JSON: {exc}") from exc
    if not isinstance(order, dict):
        raise ServerError("expected an order: a JSON object")
    return order
