"""The scripts about the gateway judge what they measure."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from benchmarks.reported import gateway_cost, overload
from benchmarks.shared.open_loop import Outcome, open_loop, summary
from benchmarks.shared.tables_gateway import gateway_cost_table, overload_table


def row(**changes: Any) -> dict[str, Any]:
    over = {"answered_per_second": 95.0, "slowest_refusal_ms": 260.0, "requests": 300}
    over["statuses"] = {"OK": 95, "RESOURCE_EXHAUSTED": 205}
    values = {"overload": {**over, **changes}, "recovered_s": changes.pop("recovered_s", 0.0)}
    return {**values, "capacity_per_second": 98.0}


class TestOverload:
    def test_a_gateway_that_keeps_its_promises(self) -> None:
        assert overload.problems(row(), 98.0) == []

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"answered_per_second": 80.0}, "answered 80.0/s, expected 90% of 98.0/s"),
            (
                {"statuses": {"OK": 1, "DEADLINE": 2, "ABORTED": 1}},
                "neither answered nor refused: ABORTED, DEADLINE",
            ),
            ({"slowest_refusal_ms": 900.0}, "a refusal took 900 ms"),
            ({"recovered_s": 1.5}, "recovered after 1.50 s"),
        ],
    )
    def test_each_broken_promise_is_named(self, changes: dict[str, Any], reason: str) -> None:
        assert reason in "\n".join(overload.problems(row(**changes), 98.0))

    def test_the_table(self) -> None:
        result = {"direct": row(answered_per_second=12.0, statuses={"OK": 12, "DEADLINE": 288}), "gateway": row()}
        lines = overload_table({"grpc": result, "http": result}).splitlines()
        assert len(lines) == 6
        assert "| grpc | 98/s | Triton directly | 12.0/s, 12% of the capacity | 260 ms | 96% | 0.00 s |" in lines


class TestOpenLoop:
    def test_requests_are_sent_whether_or_not_others_have_their_answers(self) -> None:
        sent = []

        async def send(deadline_s: float) -> str:
            sent.append(deadline_s)
            await asyncio.sleep(0.2 if len(sent) % 2 else 0.01)
            return "OK"

        outcomes = asyncio.run(open_loop(send, [number / 100 for number in range(10)], deadline_s=0.1))
        assert [outcome.status for outcome in outcomes] == ["DEADLINE", "OK"] * 5
        assert [outcome.due_s for outcome in outcomes] == [number / 100 for number in range(10)]

    def test_the_summary_keeps_refusals_apart_from_deadlines(self) -> None:
        outcomes = [Outcome(0.0, 0.1, "OK"), Outcome(0.1, 0.3, "503"), Outcome(0.2, 0.5, "DEADLINE")]
        assert summary(outcomes, seconds=0.5) == {
            "requests": 3,
            "answered_per_second": 2.0,
            "slowest_answer_ms": 100.0,
            "slowest_refusal_ms": 300.0,
            "statuses": {"503": 1, "DEADLINE": 1, "OK": 1},
        }


class TestCost:
    def test_the_cost_of_a_request_and_the_share(self) -> None:
        measured = {
            "grpc, 1 clients": {"direct": [1000.0, 1000.0], "gateway": [500.0, 500.0]},
            "grpc, 16 clients": {"direct": [2000.0, 2000.0], "gateway": [1000.0, 1000.0]},
        }
        rows = gateway_cost.described(measured)
        assert rows["grpc, 1 clients"]["cost_ms"]["median"] == pytest.approx(1.0)
        assert rows["grpc, 16 clients"]["share"].median == pytest.approx(0.5)
        assert len(gateway_cost.problems(rows)) == 2
        measured["grpc, 1 clients"]["gateway"] = [900.0, 900.0]
        measured["grpc, 16 clients"]["gateway"] = [1800.0, 1800.0]
        assert gateway_cost.problems(gateway_cost.described(measured)) == []

    def test_the_table(self) -> None:
        rate = {"direct": 1000.0, "gateway": 800.0}
        share = {"median": 0.8, "low": 0.7, "high": 0.9}
        result = {"http, 1 clients": {"requests_per_second": rate, "share": share, "cost_ms": {"median": 0.25}}}
        assert "| http, 1 client | 1,000/s | 800/s | 0.80 (0.70–0.90) | 0.25 ms |" in gateway_cost_table(
            {"rows": result}
        )
