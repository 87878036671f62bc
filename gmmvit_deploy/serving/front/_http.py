"""HTTP/1.1 for the front: uvicorn's protocol on httptools, with a limit on the size and the time of a request's head.

httptools parses in C; uvicorn with h11, in Python, needs about 0.2 ms more for each request, half of what the front
itself needs. httptools lacks two limits, which this module adds: on the size of the head (h11 has one), so that a head
without an end would fill the memory, and on the time until the head is complete (h11 has none either). Both refuse
chunked bodies with a length, two different lengths, and lengths that are no digits.

HTTP lets a server ignore the offer of another protocol, as ``Upgrade: h2c`` of curl --http2 and of Java's HttpClient.
httptools drops the body of a request with such an offer; here its head is parsed again without the offer.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES = 32 * 2**10
HEAD_TIMEOUT_S = 30.0


class _Parser(httptools.HttpRequestParser):
    """Parses a request with an offer of another protocol as a request without the offer."""

    def __init__(self, protocol: LimitedHttp) -> None:
        super().__init__(protocol)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn sets it
        self._protocol = protocol

    def feed_data(self, data: Any) -> None:
        protocol, parser = self._protocol, self
        while True:
            try:
                httptools.HttpRequestParser.feed_data(parser, data)
            except httptools.HttpParserUpgrade as exc:
                if not protocol.offers_upgrade:  # CONNECT
                    raise
                data = protocol.head_without_offer() + data[exc.args[0] :]
                parser = protocol.parser = _Parser(protocol)  # with Connection: close, this parser reads no further
            else:
                return


class LimitedHttp(HttpToolsProtocol):
    """Closes a connection whose next head is larger than `HEAD_BYTES`, or not complete after `HEAD_TIMEOUT_S`.

    The body of a request that was refused before it arrived has the same time.
    """

    _head_bytes = 0
    _in_head = True
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.parser = _Parser(self)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        in_head = self._in_head
        super().data_received(data)
        if in_head and self._in_head:  # a head that began in an earlier piece
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response(f"The head of the request is larger than {HEAD_BYTES} bytes.")
        # uvicorn has stopped its timer of idle connections: the bytes can be the start of a head, or the rest of a body
        # whose request was refused before.
        if self._timer is None and self.cycle and self.cycle.response_complete:
            self._start_timer()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes, self._in_head = 0, True
        self._start_timer()

    @property
    def offers_upgrade(self) -> bool:
        """True if the client would take an answer in another protocol than HTTP/1.1."""
        return self.parser.should_upgrade() and any(name == b"upgrade" for name, _ in self.headers)

    def head_without_offer(self) -> bytes:
        """Return the head of the request, without the header Upgrade."""
        kept = [b"%s: %s\r\n" % (name, value) for name, value in self.headers if name != b"upgrade"]
        version = self.parser.get_http_version().encode()
        return b"%s %s HTTP/%s\r\n%s\r\n" % (self.parser.get_method(), self.url, version, b"".join(kept))

    def on_headers_complete(self) -> None:
        if self.offers_upgrade:
            return
        self._in_head = False
        self._stop_timer()
        super().on_headers_complete()
        if any(name == b"transfer-encoding" for name, _ in self.headers):
            self.cycle.keep_alive = False  # the front refuses chunked bodies, which may end in headers without a limit

    def on_message_complete(self) -> None:
        if not self.offers_upgrade:
            super().on_message_complete()

    def _start_timer(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
