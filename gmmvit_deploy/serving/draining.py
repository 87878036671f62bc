"""Stop a server under load: refuse new requests, and close connections only when their requests are answered.

After SIGTERM, Triton resets new HTTP connections, waits until every HTTP connection is closed, for up to its exit
timeout, completes the requests in progress, and answers further gRPC requests with NOT_FOUND. An idle client would
hold up the exit, a busy client would lose a request at the end of that time, and clients do not retry NOT_FOUND. A
`Drain` therefore works on the sockets of the server before SIGTERM:

new connections     go to a second socket on the same port, chosen by a packet program of SO_ATTACH_REUSEPORT_CBPF.
                    Over HTTP, this process answers 503 with Retry-After. Over gRPC, the connection is closed when the
                    server has ended, which clients report as UNAVAILABLE.
HTTP connections    are closed as soon as the last request is answered. A packet filter holds back what the client
                    sends in that moment, so that no request is read and then lost; the client reads 503 instead.
gRPC connections    are served until all HTTP connections are closed. Then a packet filter holds back new requests, and
                    Triton completes the others.

Linux permits pidfd_getfd(2), which duplicates the sockets, for a child process, and some containers forbid it. Then
`on_problem` states it, and SIGTERM has only the effects above.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from gmmvit_deploy.serving.local_http import HttpThread

__all__ = ["Drain"]

_PIDFD_OPEN, _PIDFD_GETFD = 434, 438
_ATTACH_FILTER, _DETACH_FILTER, _ATTACH_REUSEPORT_CBPF = 26, 27, 51
_LISTEN, _ESTABLISHED, _CLOSE_WAIT = "0A", "01", "08"
_LIST_S = 0.1
_FRESH_MS = 500
"""A connection without a request is closed after this time; its first request may be on the way."""
_UNCLEAR_MS = 5000
_READ_S = 0.05
"""The time that a client gets to read the last answer before the refusal arrives: some clients would drop both."""
_MOST_READ = 1 << 26
"""The largest request body, in bytes, that is read before the refusal. A client may ignore an earlier refusal."""
_MESSAGE = b'{"error":"the server is stopping; send the request again later, or to another server"}'
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Type: application/json\r\nConnection: close\r\n"
    + f"Content-Length: {len(_MESSAGE)}\r\n\r\n".encode()
    + _MESSAGE
)


class _Instruction(ctypes.Structure):
    # struct sock_filter of linux/filter.h
    _fields_ = [
        ("code", ctypes.c_uint16),
        ("jump_true", ctypes.c_uint8),
        ("jump_false", ctypes.c_uint8),
        ("constant", ctypes.c_uint32),
    ]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction))]


_SECOND_SOCKET = ((0x06, 0, 0, 1),)
"""return 1: the second socket that listens on the port."""
_NO_PAYLOAD = (
    (0x30, 0, 0, 12),  # load byte 12 of the TCP header, whose upper half is the header's length in words
    (0x74, 0, 0, 4),  # shift right by 4
    (0x64, 0, 0, 2),  # shift left by 2: bytes
    (0x07, 0, 0, 0),  # copy to X
    (0x80, 0, 0, 0),  # load the length of the packet
    (0x1D, 0, 1, 0),  # equal to X, so there is no payload?
    (0x06, 0, 0, 0xFFFFFFFF),  # keep the packet
    (0x06, 0, 0, 0),  # drop the packet; the client sends it again
)


def _attach(target: socket.socket, option: int, code: tuple[tuple[int, int, int, int], ...]) -> None:
    instructions = (_Instruction * len(code))(*(_Instruction(*line) for line in code))
    target.setsockopt(socket.SOL_SOCKET, option, bytes(_Program(len(code), instructions)))


def _system_call(number: int, *arguments: int) -> int:
    """Call Linux.  Some builds of Python have no `os.pidfd_open`.  Errors: OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    answer: int = libc.syscall(number, *arguments)
    if answer < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return answer


class Drain:
    """Inside ``with Drain(pid, http_port, grpc_port) as drain:`` new connections are refused."""

    def __init__(
        self, pid: int, http_port: int, grpc_port: int, *, on_problem: Callable[[str], None] = lambda text: None
    ) -> None:
        """Prepare.

        pid: the server's process ID.  http_port, grpc_port: the server's ports.
        on_problem: called with a sentence if this system does not permit to work on the server's sockets.
        """
        self._pid, self._http_port, self._grpc_port, self._on_problem = pid, http_port, grpc_port, on_problem
        self._pidfd = -1
        self._open: dict[str, _Connection] = {}
        self._kept: list[socket.socket] = []
        self._refusal: HttpThread | None = None
        self._next_list = 0.0
        self._listed = 1

    def __enter__(self) -> Drain:
        try:
            self._pidfd = _system_call(_PIDFD_OPEN, self._pid, 0)
            self._divert()
        except OSError as exc:
            self._on_problem(
                f"the sockets of the server are not accessible ({exc.strerror or exc}); Triton resets new HTTP "
                "connections, and idle HTTP connections can hold up its exit"
            )
            self._release()
        return self

    def __exit__(self, *_: object) -> None:
        self._release()

    @property
    def http_is_closed(self) -> bool:
        """True if no HTTP connection is open, or if this system does not permit to close the connections."""
        return self._pidfd < 0 or not (self._open or self._listed)

    def close_http(self) -> None:
        """Close each HTTP connection that is between two requests.  Call this method until `http_is_closed`."""
        if self._pidfd < 0:
            return
        if time.monotonic() >= self._next_list:
            self._list()
            self._next_list = time.monotonic() + _LIST_S
        for inode, connection in tuple(self._open.items()):
            try:
                closed = connection.close_if_idle()
            except OSError:  # the client has closed the connection
                closed = True
            if closed:
                self._kept.append(connection.socket)  # open until the end, so that Linux answers nothing with a reset
                del self._open[inode]

    def hold_grpc(self) -> None:
        """Let the server read no more gRPC requests."""
        if self._pidfd < 0:
            return
        for number, _, state in self._sockets(self._grpc_port):
            if state == _ESTABLISHED:
                with contextlib.suppress(OSError):  # closed in the meantime
                    connection = _Connection(self._duplicate(number))
                    self._kept.append(connection.socket)
                    connection.hold()

    def _divert(self) -> None:
        for port in (self._http_port, self._grpc_port):
            for number, _, state in self._sockets(port):
                if state != _LISTEN:
                    continue
                with self._duplicate(number) as server:
                    second = _second_socket(server)
                if port == self._http_port:
                    self._refusal = HttpThread(second, _RefuseRequest)
                else:
                    self._kept.append(second)
        # Connections that reached the server's own sockets are accepted before the server stops.
        time.sleep(0.05)

    def _list(self) -> None:
        known = {inode for inode, _ in self._open.items()}
        sockets = [entry for entry in self._sockets(self._http_port) if entry[2] in (_ESTABLISHED, _CLOSE_WAIT)]
        self._listed = len(sockets)
        for number, inode, _ in sockets:
            if inode not in known:
                with contextlib.suppress(OSError):  # closed in the meantime
                    self._open[inode] = _Connection(self._duplicate(number))

    def _sockets(self, port: int) -> list[tuple[int, str, str]]:
        """Return (descriptor in the server, inode, state) of each socket of the port."""
        states = {}
        for table in ("tcp", "tcp6"):
            path = Path(f"/proc/{self._pid}/net/{table}")
            for line in path.read_text(encoding="utf-8").splitlines()[1:] if path.exists() else ():
                fields = line.split()
                if int(fields[1].rpartition(":")[2], 16) == port:
                    states[fields[9]] = fields[3]
        sockets = []
        with contextlib.suppress(OSError):  # the server has ended
            for link in Path(f"/proc/{self._pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    match = re.fullmatch(r"socket:\[(\d+)\]", str(link.readlink()))
                    if match and match[1] in states:
                        sockets.append((int(link.name), match[1], states[match[1]]))
        return sockets

    def _duplicate(self, number: int) -> socket.socket:
        return socket.socket(fileno=_system_call(_PIDFD_GETFD, self._pidfd, number, 0))

    def _release(self) -> None:
        if self._refusal is not None:
            self._refusal.close()
            self._refusal = None
        for opened in (*self._kept, *(connection.socket for connection in self._open.values())):
            opened.close()
        self._kept, self._open = [], {}
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


@dataclass(frozen=True, slots=True)
class _Traffic:
    """What Linux counts for a connection.  sent_ms, received_ms: the time since data was last sent and received."""

    sent_ms: int
    received_ms: int
    sent_bytes: int
    received_bytes: int
    unsent_bytes: int


class _Connection:
    """A duplicate of an HTTP connection of the server."""

    def __init__(self, duplicate: socket.socket) -> None:
        self.socket = duplicate
        self._before: _Traffic | None = None
        self._idle: bool | None = None
        self._held_at: float | None = None

    def close_if_idle(self) -> bool:
        """Close the connection if its last request is answered, and return whether it is closed.

        Errors: OSError when the connection is closed already.
        """
        if self._held_at is None:
            self._hold_if_idle()
            return False
        if time.monotonic() - self._held_at < _READ_S:
            return False
        self.socket.send(_REFUSAL, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        self.socket.shutdown(socket.SHUT_RDWR)
        return True

    def hold(self) -> None:
        """Hold back what the client sends from now on."""
        _attach(self.socket, _ATTACH_FILTER, _NO_PAYLOAD)

    def _hold_if_idle(self) -> None:
        traffic = self._traffic()
        self._idle = _is_idle(traffic, self._before, self._idle)
        self._before = traffic
        if not self._idle:
            return
        self.hold()
        if self._traffic().received_bytes != traffic.received_bytes:  # a request arrived before the filter
            self.socket.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)
        else:
            self._held_at = time.monotonic()

    def _traffic(self) -> _Traffic:
        """Read struct tcp_info of linux/tcp.h."""
        info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        acknowledged, received = struct.unpack_from("QQ", info, 120)
        return _Traffic(
            sent_ms=struct.unpack_from("I", info, 44)[0],
            received_ms=struct.unpack_from("I", info, 52)[0],
            sent_bytes=struct.unpack_from("Q", info, 200)[0] if len(info) >= 208 else acknowledged,
            received_bytes=received,
            unsent_bytes=struct.unpack_from("I", info, 144)[0],
        )


def _is_idle(now: _Traffic, before: _Traffic | None, was_idle: bool | None) -> bool | None:
    """Return whether the last request is answered; None if the counters do not show which came last.

    An answer is the last traffic of an idle connection. Linux measures the times in steps of up to 10 ms, so two
    readings of the counters decide between equal times.
    """
    if now.unsent_bytes:
        return False
    if not now.received_bytes:
        return now.received_ms >= _FRESH_MS
    if now.sent_ms != now.received_ms:
        return now.sent_ms < now.received_ms
    if before is not None:
        answered, asked = now.sent_bytes != before.sent_bytes, now.received_bytes != before.received_bytes
        if answered != asked:
            return answered
        if not answered and was_idle is not None:
            return was_idle
    return True if now.sent_ms >= _UNCLEAR_MS else None


def _second_socket(server: socket.socket) -> socket.socket:
    """Return another socket that listens on the port of ``server``, and gets all new connections.

    Errors: OSError when Linux refuses the second socket.
    """
    own = socket.socket(server.family, socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if server.family == socket.AF_INET6:
            both = server.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
            own.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, both)
        own.bind(server.getsockname())
        own.listen(1024)
        _attach(own, _ATTACH_REUSEPORT_CBPF, _SECOND_SOCKET)
    except OSError:
        own.close()
        raise
    return own


class _RefuseRequest(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 5  # seconds

    def _refuse(self) -> None:
        left = min(int(self.headers.get("Content-Length") or 0), _MOST_READ)
        while left > 0 and (piece := self.rfile.read(min(left, 1 << 16))):
            left -= len(piece)
        self.close_connection = True
        self.wfile.write(_REFUSAL)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _refuse  # noqa: N815 - the names that http.server calls

    def log_message(self, *_: object) -> None:
        """Write no line for a request."""
