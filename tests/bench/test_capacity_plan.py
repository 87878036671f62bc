"""The queue that `benchmarks/reported/capacity_plan.py` computes for the arrivals of a run."""

from __future__ import annotations

import pytest

from benchmarks.reported.capacity_plan import arrivals, compared, queued
from benchmarks.shared.tables_machines import capacity_table
from gmmvit_deploy.manifests.plan import Station, latency

STATION = Station(instances=1, service_s=1.0, overhead_s=0.5)


def test_requests_wait_for_the_requests_before_them() -> None:
    due = [2.0, 2.0, 2.5]  # the first second is left out
    assert queued(due, STATION, 1)["mean_ms"] == pytest.approx(1000 * (1.5 + 2.5 + 3.0) / 3)
    assert queued(due, STATION, 2)["mean_ms"] == pytest.approx(1000 * (1.5 + 1.5 + 2.0) / 3)  # the third: server 1
    assert queued([0.5, 0.6, 9.0], STATION, 1)["mean_ms"] == pytest.approx(1500)


@pytest.mark.parametrize("servers", [1, 2, 4])
def test_a_long_queue_is_near_the_model(servers: int) -> None:
    station = Station(instances=2, service_s=0.02)
    rate = 0.8 * servers * station.capacity
    long = queued(arrivals(rate, 2000.0, seed=1), station, servers)
    assert latency(station, rate, servers).mean_s * 1000 == pytest.approx(long["mean_ms"], rel=0.1)


def test_the_table() -> None:
    row = compared({"mean_ms": 3000.0, "p99_ms": 3000.0}, [2.0, 2.0, 2.5], STATION, 0.5, 1)
    assert row["error"]["mean_ms"] == pytest.approx(row["model"]["mean_ms"] / 3000 - 1)
    assert "| 1 | 0 | 50% | 3000.0 ms |" in capacity_table({"rows": [row]})
