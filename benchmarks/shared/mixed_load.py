"""Clients of everything that a service offers besides tensors, and clients that the service must refuse.

    png            an encoded image to the ensemble, over gRPC
    classify       an encoded image to POST /classify, as curl sends it
    no-key, no-key-grpc, wrong-path, too-large    requests that the gateway refuses

The answers of ``png`` and ``classify`` are compared with PyTorch's logits of the bundle's golden images.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from urllib.parse import urlsplit

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.runtimes.programs.access import Access
from gmmvit_deploy.runtimes.runners.classify import TritonClassifier

EXPECTED = {
    "png": "OK",
    "classify": "200",
    "no-key": "401",
    "no-key-grpc": "UNAUTHENTICATED",
    "wrong-path": "404",
    "too-large": "413",
}
"""Kind of request → the only right status."""
_INFER = "/v2/models/gmmvit_network/infer"


@dataclass
class MixedLoad:
    """A client of each kind, which sends requests while the context is active.

    Results: ``sent`` counts requests by kind; ``unexpected`` holds a text for each answer that was not right.
    """

    where: Mapping[str, str]
    key: str
    bundle: Bundle
    max_body_bytes: int
    pause_s: float = 0.2
    sent: Counter[str] = field(default_factory=Counter)
    unexpected: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _ended: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> MixedLoad:
        clients: dict[str, Callable[[int], str]] = {
            "png": self._png,
            "classify": self._classify,
            "no-key": lambda number: self._http("POST", _INFER, b"{}", key=False)[0],
            "no-key-grpc": self._no_key_grpc,
            "wrong-path": lambda number: self._http("POST", "/v2/logging", b"{}")[0],
            "too-large": lambda number: self._http("POST", _INFER, bytes(self.max_body_bytes + 1))[0],
        }
        self._golden = self.bundle.golden_set()
        for kind, ask in clients.items():
            self._threads.append(threading.Thread(target=self._run, args=(kind, ask), daemon=True))
            self._threads[-1].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(timeout=60)

    def _run(self, kind: str, ask: Callable[[int], str]) -> None:
        number = 0
        while not self._ended.is_set():
            try:
                status = ask(number % len(self._golden.images))
            except Exception as exc:  # also what a client library raises that it does not name
                status = f"{type(exc).__name__}: {str(exc)[:200]}"
            number += 1
            with self._lock:
                self.sent[kind] += 1
                if status != EXPECTED[kind]:
                    self.unexpected.append(f"{kind}: {status}")
            self._ended.wait(self.pause_s)

    def _png(self, number: int) -> str:
        with TritonClassifier(self.where["grpc"], access=Access(key=self.key), retry_s=0) as classifier:
            logits = classifier.logits([self._golden.images[number]])[0]
        expected = self._golden.image_logits[number]
        off = float(np.abs(logits - expected).max() / np.abs(expected).max())
        return "OK" if off <= 1e-4 else f"image {number}: off by {off:.2g} of the largest logit"

    def _classify(self, number: int) -> str:
        status, body = self._http("POST", "/classify?top=1", self._golden.images[number])
        if status != "200":
            return status
        index = json.loads(body)["predictions"][0][0]["index"]
        expected = int(self._golden.image_logits[number].argmax())
        return status if index == expected else f"image {number}: class {index}, expected {expected}"

    def _no_key_grpc(self, number: int) -> str:
        with grpc.insecure_channel(self.where["grpc"].partition("://")[2]) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            try:
                stub.ModelInfer(service_pb2.ModelInferRequest(model_name="gmmvit_network"), timeout=30)
            except grpc.RpcError as exc:
                return str(exc.code().name)
        return "OK"

    def _http(self, method: str, path: str, body: bytes, *, key: bool = True) -> tuple[str, bytes]:
        parts = urlsplit(self.where["http"])
        connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=30)
        try:
            connection.request(method, path, body, {"Authorization": f"Bearer {self.key}"} if key else {})
            answer = connection.getresponse()
            return str(answer.status), answer.read()
        finally:
            connection.close()
