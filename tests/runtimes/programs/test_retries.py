"""Requests that an overloaded server refused are repeated after random waits, and never after the deadline."""

from __future__ import annotations

import pytest

from gmmvit_deploy.errors import OverloadError, ServerError
from gmmvit_deploy.runtimes.programs import triton
from gmmvit_deploy.runtimes.programs.triton import with_retries


class _Clock:
    """Stands for the module `time`: a wait ends at once, and is on the clock.  waits_s: all waits."""

    def __init__(self) -> None:
        self.waits_s: list[float] = []

    def monotonic(self) -> float:
        return sum(self.waits_s)

    def sleep(self, seconds: float) -> None:
        self.waits_s.append(seconds)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    clock = _Clock()
    monkeypatch.setattr(triton, "time", clock)
    return clock


class _Refusing:
    """Refuses the first ``refusals`` requests."""

    def __init__(self, refusals: float) -> None:
        self._left = refusals

    def __call__(self) -> str:
        self._left -= 1
        if self._left >= 0:
            raise OverloadError("the queue is full")
        return "answer"


def test_waits_grow_and_differ(clock: _Clock) -> None:
    for _ in range(50):
        with_retries(_Refusing(8), deadline_s=1e9)
    for number in range(8):
        of_number = clock.waits_s[number::8]
        assert 0 <= min(of_number) <= max(of_number) <= min(5.0, 0.1 * 2**number)
        assert max(of_number) > 0.7 * min(5.0, 0.1 * 2**number)  # 50 draws: fails once in 5e7 runs
        assert len(set(of_number)) == 50


def test_other_errors_are_not_repeated() -> None:
    calls = []

    def request() -> None:
        calls.append(1)
        raise ServerError("broken")

    with pytest.raises(ServerError, match="broken"):
        with_retries(request, deadline_s=10)
    assert len(calls) == 1
