"""Programs that are timed in turn disturb each other as little as possible."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest

from gmmvit_deploy.measure import turns
from gmmvit_deploy.measure.turns import seconds_in_turn, seconds_of_turn


def test_programs_lead_in_turn_and_run_untimed_first() -> None:
    order: list[int] = []
    seconds = seconds_in_turn([partial(order.append, number) for number in (0, 1)], rounds=2, turn_s=0.0)
    assert order == [0, 1, 1, 1, 0, 0, 0, 0, 1, 1]  # once each, then two rounds: one untimed run, one timed
    assert [len(each) for each in seconds] == [2, 2]


def test_a_turn_returns_the_seconds_of_a_timed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    now, costs = [0.0], iter([0.5, 0.02, 0.02, 0.02])  # the first run is untimed
    monkeypatch.setattr(turns, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def run() -> None:
        now[0] += next(costs)

    assert seconds_of_turn(run, 0.05) == pytest.approx(0.02)
    assert next(costs, None) is None  # as many timed runs as the turn needs
