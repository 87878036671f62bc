"""Which answers to probes mean that a model is dead."""

from __future__ import annotations

import pytest

from gmmvit_deploy.serving.health import ModelHealth
from gmmvit_deploy.serving.probes import Answer

OK, LATE = Answer(result="answered"), Answer(result="late", detail="no answer within 2.0 s")
DEAD = Answer(result="refused", detail="status 500: Stub process is not healthy")
GONE = Answer(result="unreachable", detail="connection refused")


def after(*answers: Answer, others_answered: bool = False, computing: bool = False) -> str:
    health = ModelHealth("network")
    for second, answer in enumerate(answers):
        health.observe(answer, others_answered=others_answered, computing=computing, now_s=float(second))
    return health.reason


@pytest.mark.parametrize("failure", [LATE, DEAD, GONE], ids=["late", "refused", "unreachable"])
def test_the_second_failure_in_sequence_is_death(failure: Answer) -> None:
    assert after(failure) == ""
    assert after(failure, OK, failure) == ""
    assert after(failure, failure) == f"network failed 2 probes in sequence: {failure.detail}"


@pytest.mark.parametrize("failure", [LATE, DEAD, GONE], ids=["late", "refused", "unreachable"])
def test_completed_requests_of_clients_are_life(failure: Answer) -> None:
    assert after(*[failure] * 100, others_answered=True) == ""


def test_traffic_ends_a_sequence_of_failures() -> None:
    health = ModelHealth("network")
    health.observe(LATE, others_answered=False, computing=False, now_s=0.0)
    health.observe_traffic()
    health.observe(LATE, others_answered=False, computing=False, now_s=1.0)
    assert health.reason == ""


def test_a_worker_that_computes_is_alive_for_a_limited_time() -> None:
    assert after(*[LATE] * 60, computing=True) == ""
    assert after(*[LATE] * 62, computing=True).startswith("network failed 2 probes")


@pytest.mark.parametrize("failure", [DEAD, GONE], ids=["refused", "unreachable"])
def test_a_worker_that_computes_excuses_no_refusal(failure: Answer) -> None:
    assert after(failure, failure, computing=True) != ""
