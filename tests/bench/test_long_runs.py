"""The scripts that run a service for long judge what they measure."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from benchmarks.reported import rollout, soak
from benchmarks.shared.checked_load import KINDS
from benchmarks.shared.growth import Growth, Sampler, fitted, grown
from benchmarks.shared.mixed_load import EXPECTED
from benchmarks.shared.tables_rollout import rollout_table, soak_table


def row(bundle: str, **changes: Any) -> dict[str, Any]:
    refused = bundle in rollout.REFUSED
    outcome = "refused" if refused else "promoted"
    values = {"bundle": bundle, "expected": outcome, "outcome": outcome, "reason": rollout.REFUSED.get(bundle, "")}
    return {**values, "seconds": 12.3, "requests": 1500, "answers": {"first": 1200, bundle: 300}, **changes}


def result(**changes: Any) -> dict[str, Any]:
    values = {"requests": 3000, "by_kind": dict.fromkeys(KINDS, 1000), "lost": 0, "wrong": 0}
    rates = {"capacity_per_second": 260.0, "requests_per_second": 130.0}
    return {**values, **rates, "rollouts": [row("second"), row("slow"), row("first"), row("decisions")], **changes}


class TestRollout:
    def test_ten_rollouts_have_three_of_bundles_that_must_be_refused(self) -> None:
        names = rollout.plan(10)
        assert names == ["second", "slow", "first", "second", "decisions", "first", "second", "slow", "first", "second"]
        assert rollout.plan(3) == names[:3]

    def test_a_service_that_keeps_its_promises(self) -> None:
        assert rollout.problems(result(), 3000) == []

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"lost": 1}, "1 requests were lost"),
            ({"wrong": 2}, "2 requests were wrong"),
            ({"requests": 2999}, "2999 requests were sent, expected 3000"),
            ({"by_kind": {"grpc": 3000, "http-kept": 0}}, "no request of kind http-kept"),
            ({"rollouts": [row("slow", outcome="promoted")]}, "rollout 1, slow: promoted, expected refused"),
            ({"rollouts": [row("first", outcome="refused", reason="late")]}, "refused, expected promoted: late"),
            ({"rollouts": [row("slow", reason="no bundle")]}, "refused for another reason: no bundle"),
            ({"rollouts": [row("slow", answers={"first": 9})]}, "rollout 1, slow: the bundle answered no request"),
        ],
    )
    def test_each_broken_promise_is_named(self, changes: dict[str, Any], reason: str) -> None:
        assert reason in "\n".join(rollout.problems(result(**changes), 3000))

    def test_the_table(self) -> None:
        text = rollout_table(result(lost=4))
        assert "3,000 requests (1,000 grpc, 1,000 http-kept, 1,000 http-new) at 130/s" in text
        assert "Lost: 4. Wrong: 0." in text
        assert "| 2 | slow | refused | refused | 12.3 s | 1,500 | 300 |" in text


LEAK = """
import time
kept = []
for _ in range(800):
    kept.append((bytearray(b"x" * 200_000), open("/dev/null")))
    time.sleep(0.02)
time.sleep(60)
"""
"""Fewer descriptors than the usual limit of a process, 1,024."""


class TestGrowth:
    TIMES = np.arange(0.0, 3600.0, 5.0)

    def noisy(self, growth: float) -> list[float]:
        """Return an hour of samples around 100 that grow; each remembers nine tenths of the noise before it."""
        generator = np.random.default_rng(0)
        noise = np.zeros(len(self.TIMES))
        for index in range(1, len(noise)):
            noise[index] = 0.9 * noise[index - 1] + generator.normal(0, 0.5)
        return list(100 + noise + growth * self.TIMES / self.TIMES[-1])

    def test_a_planted_growth_is_within_the_interval(self) -> None:
        for growth in (0.0, 3.0, 20.0):
            fit = fitted(self.TIMES, self.noisy(growth), limit=8.0)
            assert fit.low < growth < fit.high
            assert fit.high - fit.low < 3

    @pytest.mark.parametrize(("growth", "problems"), [(0.0, 0), (3.0, 0), (12.0, 1)])
    def test_growth_above_the_limit_is_a_problem(self, growth: float, problems: int) -> None:
        row = {"memory_mib": fitted(self.TIMES, self.noisy(growth), limit=8.0)}
        assert len(grown({"haproxy": row})) == problems

    def test_a_series_too_noisy_to_exclude_growth_is_a_problem(self) -> None:
        values = np.random.default_rng(0).normal(100, 60, len(self.TIMES))
        assert grown({"haproxy": {"memory_mib": fitted(self.TIMES, list(values), limit=8.0)}})

    def test_a_constant_series_does_not_grow(self) -> None:
        fit = fitted(self.TIMES, [17.0] * len(self.TIMES), limit=4.0)
        assert (fit.low, fit.growth, fit.high) == (0.0, 0.0, 0.0)

    def test_too_few_samples_are_refused(self) -> None:
        with pytest.raises(ValueError, match="expected at least 12 samples, got 3"):
            fitted([0, 1, 2], [0, 1, 2], limit=1)

    @pytest.mark.process
    def test_a_process_that_leaks_memory_and_descriptors_is_seen(self) -> None:
        with subprocess.Popen([sys.executable, "-c", LEAK]) as process:
            try:
                deadline = time.monotonic() + 60
                with Sampler(process.pid, interval_s=0.05) as sampler:
                    while len(sampler.times) < 24 and time.monotonic() < deadline:
                        time.sleep(0.1)
            finally:
                process.kill()
        reasons = grown(sampler.growths(after=sampler.times[8]))
        assert [reason.partition(" grew")[0] for reason in reasons] == [
            "gmmvit serve: memory_mib",
            "gmmvit serve: descriptors",
        ]


class TestSoak:
    def result(self, **changes: Any) -> dict[str, Any]:
        flat = Growth(mean=50.0, growth=0.5, low=-0.5, high=1.5, limit=8.0, samples=600)
        values = {"lost": 0, "wrong": 0, "unexpected": 0, "warm_up_s": 300.0, "measured_s": 3300.0}
        values["requests"] = dict.fromkeys((*KINDS, *EXPECTED), 10)
        values["processes"] = dict.fromkeys(soak.PARTS, 1)
        return {**values, "growth": {"haproxy": {"memory_mib": flat, "descriptors": flat}}, **changes}

    def test_a_service_that_keeps_its_promises(self) -> None:
        assert soak.problems(self.result()) == []

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"lost": 1}, "1 requests were lost"),
            ({"unexpected": 3}, "3 requests got another status than expected"),
            ({"requests": {"grpc": 1}}, "no request of kind classify was sent"),
            ({"processes": {"haproxy": 1}}, "no process front was sampled"),
            ({"processes": {**dict.fromkeys(soak.PARTS, 1), "haproxy": 2}}, "haproxy was started 2 times"),
        ],
    )
    def test_each_broken_promise_is_named(self, changes: dict[str, Any], reason: str) -> None:
        assert reason in "\n".join(soak.problems(self.result(**changes)))

    def test_the_table(self) -> None:
        result = self.result()
        result["growth"] = {
            kind: {name: asdict(each) for name, each in row.items()} for kind, row in result["growth"].items()
        }
        text = soak_table(result)
        assert "90 requests, measured for 55 minutes after a warm-up of 5.0 minutes. Lost: 0." in text
        assert "| haproxy | 50.0 | +0.50 (-0.50 to +1.50; 8.0) | 50.0 | +0.50 (-0.50 to +1.50; 8.0) |" in text
