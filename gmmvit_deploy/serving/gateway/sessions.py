"""A connection to HAProxy for several commands.

After SIGUSR1, HAProxy refuses new connections to its socket, but keeps a connection that is open, and does not end
before this connection.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path
from types import TracebackType

from gmmvit_deploy.errors import ServerError

__all__ = ["CommandSession"]

_PROMPT = b"\n> "
_POLL_S = 0.05


class CommandSession:
    """A connection for several commands.  Errors of every method: ServerError when HAProxy does not answer."""

    def __init__(self, socket_path: Path) -> None:
        self._path = socket_path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def __enter__(self) -> CommandSession:
        try:
            self._socket.settimeout(10)
            self._socket.connect(str(self._path))
            self.command("prompt")
        except OSError as exc:
            self._socket.close()
            raise ServerError(f"HAProxy does not answer on {self._path}: {exc}") from exc
        except BaseException:
            self._socket.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def command(self, text: str) -> str:
        """Send a command, and return the answer."""
        answer = b""
        try:
            self._socket.sendall(f"{text}\n".encode())
            while not answer.endswith(_PROMPT):
                piece = self._socket.recv(65536)
                if not piece:
                    raise ServerError(f"HAProxy closed the connection on {self._path}")
                answer += piece
        except OSError as exc:
            raise ServerError(f"HAProxy does not answer on {self._path}: {exc}") from exc
        return answer.removesuffix(_PROMPT).decode(errors="replace").strip()

    def requests(self) -> int:
        """Return the number of requests in progress: a connection between two requests has no stream."""
        streams = [line for line in self.command("show sess").splitlines() if line.startswith("0x")]
        return sum(" fe=GLOBAL " not in line for line in streams)

    def wait_idle(self, timeout_s: float) -> None:
        """Wait until no request is in progress, at two looks in sequence, or until the time is over."""
        deadline, looks = time.monotonic() + timeout_s, 0
        while looks < 2 and time.monotonic() < deadline:
            looks = 0 if self.requests() else looks + 1
            time.sleep(_POLL_S)
