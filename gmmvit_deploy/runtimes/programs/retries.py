"""Repeat a request that an overloaded server refused, with random waits, until a deadline."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from gmmvit_deploy.errors import OverloadError

__all__ = ["with_retries"]

_FIRST_S = 0.1
_LONGEST_S = 5.0
_Result = TypeVar("_Result")


def with_retries(request: Callable[[], _Result], *, deadline_s: float) -> _Result:
    """Return the answer of ``request``, and repeat it after each OverloadError until ``deadline_s`` has passed.

    wait_s = retry_after_s + U(0, min(5, 0.1 · 2ⁿ)) after the refusal number n = 0, 1, …; U is uniform. Random waits
    keep clients that were refused together from coming back together.
    deadline_s: seconds from now in which a repetition may start; 0 repeats nothing.
    Errors: OverloadError when the next wait would end after the deadline. Every other error of ``request`` at once.
    """
    end = time.monotonic() + deadline_s
    refusals = 0
    while True:
        try:
            return request()
        except OverloadError as exc:
            wait_s = (exc.retry_after_s or 0.0) + _jitter_s(refusals)
            refusals += 1
            if time.monotonic() + wait_s > end:
                if refusals == 1:
                    raise
                raise OverloadError(
                    f"{exc}; refused {refusals} times within {deadline_s:g} s",
                    hint=exc.hint,
                    retry_after_s=exc.retry_after_s,
                ) from exc
        time.sleep(wait_s)


def _jitter_s(refusals: int) -> float:
    largest_s = min(_LONGEST_S, _FIRST_S * 2 ** min(refusals, 16))
    return random.uniform(0.0, largest_s)  # noqa: S311 - spreads load, guards nothing
