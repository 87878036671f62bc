"""Requests of clients, counted from lines of the access log."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gmmvit_deploy.serving.rollout.canary import Counts
from gmmvit_deploy.serving.rollout.traffic import Traffic

HTTP: dict[str, Any] = {
    "protocol": "http",
    "path": "/v2/models/gmmvit/infer",
    "server": "green",
    "status": 200,
    "grpc_status": "-",
    "queue_ms": 0,
    "network_us": 2500,
    "end": "--",
}
GRPC = {**HTTP, "protocol": "grpc", "path": "/inference.GRPCInferenceService/ModelInfer"}
ANSWERED, FAILED, NOTHING = (1, 0), (0, 1), (0, 0)


@pytest.mark.parametrize(
    ("request_", "changes", "expected"),
    [
        (HTTP, {}, ANSWERED),
        (HTTP, {"status": 500}, FAILED),
        (HTTP, {"status": 400}, FAILED),
        (HTTP, {"status": 503}, NOTHING),  # overload
        (HTTP, {"status": 502, "end": "SH"}, FAILED),  # the server ended
        (HTTP, {"status": 503, "end": "SC"}, FAILED),
        (HTTP, {"status": 504, "end": "sH"}, FAILED),
        (HTTP, {"status": 503, "end": "sQ"}, NOTHING),
        (HTTP, {"status": -1, "end": "CH"}, NOTHING),  # the client left
        (HTTP, {"path": "/v2/models/gmmvit/config"}, NOTHING),
        (HTTP, {"server": "blue"}, NOTHING),
        (GRPC, {}, ANSWERED),
        (GRPC, {"grpc_status": "0"}, ANSWERED),
        (GRPC, {"grpc_status": "13"}, FAILED),
        (GRPC, {"grpc_status": "8"}, NOTHING),
        (GRPC, {"grpc_status": "14"}, NOTHING),
        (GRPC, {"grpc_status": "14", "end": "SH"}, FAILED),
        (GRPC, {"path": "/inference.GRPCInferenceService/ModelReady"}, NOTHING),
    ],
)
def test_what_a_line_counts(request_: dict[str, Any], changes: dict[str, Any], expected: tuple[int, int]) -> None:
    traffic = Traffic()
    traffic.count(json.dumps({**request_, **changes}).encode())
    counts = traffic.counts("green")
    assert (counts.answered, counts.failed) == expected
    assert counts.time_us == (2500 if expected == ANSWERED else 0)


def test_the_time_in_the_queue_is_not_the_servers() -> None:
    traffic = Traffic()
    traffic.count(json.dumps({**HTTP, "queue_ms": 2}).encode())
    assert traffic.counts("green") == Counts(answered=1, failed=0, time_us=500)


@pytest.mark.parametrize("line", [b"", b"Proxy http stopped", b"{", b"[]", b"{}", b'{"path": 7}', b"\xff"])
def test_other_lines_are_ignored(line: bytes) -> None:
    traffic = Traffic()
    traffic.count(line)
    assert traffic.counts("green") == Counts(answered=0, failed=0, time_us=0)
