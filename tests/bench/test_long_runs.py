"""The scripts that run a service for long judge what they measure."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.reported import rollout
from benchmarks.shared.checked_load import KINDS
from benchmarks.shared.tables_rollout import rollout_table


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
