"""Clients that hold every answer of a service to the bundle that the answer states.

    grpc     gRPC, a kept channel         http-kept   HTTP, a kept connection
    http-new HTTP, a connection a request

A request is lost if it gets another status than success, or no answer; it is wrong if the logits are not those of the
stated bundle, within 1e-4 of the largest logit. A service of several models states no bundle: the logits must then be
those of one of the expected bundles.
"""

from __future__ import annotations

import http.client
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import grpc
import numpy as np

from gmmvit_deploy.serving.front.options import BUNDLE_HEADER
from tests.serving.gateways import Stub, binary_request, grpc_request, logits_of, request
from tests.serving.stand_in import NETWORK
from tests.waiting import wait_until

KINDS = ("grpc", "http-kept", "http-new")
ANSWERED = "answered"


class _RefusedError(Exception):
    """Over HTTP, a request got another status than 200."""


@dataclass
class CheckedLoad:
    """A load from several clients.  Inside ``with CheckedLoad(…) as load:`` the clients send requests.

    grpc_url, http_url: the addresses of the service, without TLS.  key: the key of the clients.
    expected: SHA-256 of a bundle → its logits (B, C) for ``pixels``.  pixels: uint8 (B, height, width, channels).
    rate: the number of requests a second of all clients.  clients: the number of clients of each kind.
    network: the model that they ask.
    Results: ``sent`` counts requests by kind, ``answered`` by bundle; ``lost`` and ``wrong`` hold a text for each;
    ``outcomes`` holds (time, kind, outcome) of each: `ANSWERED`, the refusal's status, or the name of an exception.
    """

    grpc_url: str
    http_url: str
    key: str
    pixels: np.ndarray
    expected: Mapping[str, np.ndarray]
    rate: float
    clients: int = 2
    network: str = NETWORK
    sent: Counter[str] = field(default_factory=Counter)
    answered: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    outcomes: list[tuple[float, str, str]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _ended: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> CheckedLoad:
        for kind in KINDS:
            for number in range(self.clients):
                thread = threading.Thread(target=self._run, args=(kind, number), daemon=True)
                thread.start()
                self._threads.append(thread)
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(timeout=60)

    @property
    def total(self) -> int:
        return sum(self.sent.values())

    def await_more(self, count: int) -> None:
        """Wait until each kind of client has sent ``count`` more requests, and has got their answers."""
        before = Counter(self.sent)
        enough = lambda: all(self.sent[kind] >= before[kind] + count for kind in KINDS)  # noqa: E731
        wait_until(enough, f"{count} more requests of each kind of client")

    def await_answers(self) -> None:
        """Wait until each kind of client has got an answer from now on."""
        since = time.monotonic()
        kinds = lambda: {kind for when, kind, outcome in self.outcomes if when > since and outcome == ANSWERED}  # noqa: E731
        wait_until(lambda: kinds() == {*KINDS}, "an answer to each kind of client")

    def _run(self, kind: str, number: int) -> None:
        generator = np.random.default_rng(number)
        asks = {"grpc": self._grpc, "http-kept": self._http_kept, "http-new": self._http_new}[kind]()
        pause_s = self.clients * len(KINDS) / self.rate
        next_at = time.monotonic() + generator.random() * pause_s
        while not self._ended.wait(max(0.0, next_at - time.monotonic())):
            next_at += generator.exponential(pause_s)
            next_at = max(next_at, time.monotonic() - 1.0)  # a slow moment is not made up for by a burst of requests
            row = int(generator.integers(len(self.pixels)))
            try:
                bundle, logits = asks(self.pixels[row : row + 1])
            except Exception as exc:
                with self._lock:
                    self.sent[kind] += 1
                    self.lost.append(f"{kind}: {type(exc).__name__}: {str(exc)[:200]}")
                    self.outcomes.append((time.monotonic(), kind, _outcome_of(exc)))
                continue
            self._judge(kind, row, bundle, logits)

    def _judge(self, kind: str, row: int, bundle: str, logits: np.ndarray) -> None:
        known = {bundle: self.expected.get(bundle)} if bundle else self.expected
        offs = {
            each: np.inf if values is None else float(np.abs(logits[0] - values[row]).max() / np.abs(values[row]).max())
            for each, values in known.items()
        }
        bundle, off = min(offs.items(), key=lambda item: item[1])
        with self._lock:
            self.sent[kind] += 1
            self.answered[bundle] += 1
            self.outcomes.append((time.monotonic(), kind, ANSWERED))
            if not off <= 1e-4:
                self.wrong.append(f"{kind}: row {row} of bundle {bundle[:12]}: off by {off:.2g} of the largest logit")

    def _grpc(self) -> Any:
        stub = Stub(self.grpc_url, key=self.key)

        def ask(pixels: np.ndarray) -> tuple[str, np.ndarray]:
            answer, headers = stub.call("ModelInfer", grpc_request("pixels", pixels, model=self.network), timeout=30)
            logits = np.frombuffer(answer.raw_output_contents[0], np.float32).reshape(answer.outputs[0].shape)
            return headers.get(BUNDLE_HEADER, ""), logits

        return ask

    def _http_kept(self) -> Any:
        parts = urlsplit(self.http_url)
        connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=30)

        def ask(pixels: np.ndarray) -> tuple[str, np.ndarray]:
            try:
                return self._ask(pixels, connection)
            except (OSError, http.client.HTTPException):
                connection.close()  # the next request opens it again
                raise

        return ask

    def _http_new(self) -> Any:
        return self._ask

    def _ask(self, pixels: np.ndarray, connection: http.client.HTTPConnection | None = None) -> tuple[str, np.ndarray]:
        body, headers = binary_request("pixels", pixels)
        path = f"/v2/models/{self.network}/infer"
        answer = request(self.http_url, path, body, headers=headers, key=self.key, connection=connection)
        if answer.status != 200:
            raise _RefusedError(answer.status, answer.body[:200].decode(errors="replace"))
        return answer.headers.get(BUNDLE_HEADER, ""), logits_of(answer)


def _outcome_of(failure: Exception) -> str:
    if isinstance(failure, grpc.RpcError):
        return str(failure.code())
    return str(failure.args[0]) if isinstance(failure, _RefusedError) else type(failure).__name__
