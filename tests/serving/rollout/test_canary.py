"""The verdict on a canary, held to scipy's hypergeometric distribution."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import hypergeom

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.serving.rollout.canary import CanaryOptions, Counts, canary_verdict, failure_probability, share_from


def counts(answered: int, failed: int = 0, ms: float = 2.0) -> Counts:
    return Counts(answered=answered, failed=failed, time_us=int(answered * ms * 1000))


@settings(deadline=None)
@given(st.integers(0, 400), st.integers(0, 40), st.integers(1, 200), st.integers(0, 40))
def test_the_probability_of_the_failures_is_that_of_the_hypergeometric_distribution(
    old_answered: int, old_failed: int, new_answered: int, new_failed: int
) -> None:
    old, new = counts(old_answered, old_failed), counts(new_answered, new_failed)
    drawn, failures = new_answered + new_failed, old_failed + new_failed
    expected = hypergeom.sf(new_failed - 1, drawn + old_answered + old_failed, failures, drawn)
    assert failure_probability(old, new) == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_an_equal_server_passes() -> None:
    verdict = canary_verdict(counts(4000, 4), counts(200), CanaryOptions())
    assert verdict.good, verdict.reasons


def test_a_server_that_fails_more_often_does_not_pass() -> None:
    verdict = canary_verdict(counts(4000), counts(190, 10), CanaryOptions())
    assert not verdict.good
    assert "10 of 200 requests failed in the new server" in verdict.reasons[0]


def test_a_failure_that_the_old_server_has_too_is_no_reason() -> None:
    assert canary_verdict(counts(3800, 200), counts(190, 10), CanaryOptions()).good


def test_a_single_failure_of_a_large_share_is_chance() -> None:
    assert canary_verdict(counts(1000, 0), counts(999, 1), CanaryOptions(share=0.5)).good


def test_a_slow_server_does_not_pass_and_the_reason_names_both_times() -> None:
    verdict = canary_verdict(counts(4000, ms=2.0), counts(200, ms=3.2), CanaryOptions(slower=1.5))
    assert not verdict.good
    assert "3.20 ms in the new server, 2.00 ms in the old server: 1.60 times, at most 1.5" in verdict.reasons[1]


def test_a_server_that_answered_nothing_does_not_pass() -> None:
    assert not canary_verdict(counts(100), counts(0), CanaryOptions()).good


@pytest.mark.parametrize(("text", "share"), [("5%", 0.05), ("0.05", 0.05), ("12.5%", 0.125)])
def test_a_share_is_written_in_percent_or_as_a_number(text: str, share: float) -> None:
    assert share_from(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["five", "", "%", "5 percent"])
def test_other_text_is_no_share(text: str) -> None:
    with pytest.raises(InputError, match="--canary: expected a share above 0% and below 100%, such as 5%"):
        share_from(text)


@pytest.mark.parametrize(
    ("field", "value"),
    [("share", 0.0), ("share", 1.0), ("requests", 0), ("timeout_s", 0.0), ("slower", 0.0), ("agreement", 1.5)],
)
def test_values_outside_their_range_are_refused(field: str, value: float) -> None:
    with pytest.raises(InputError, match="--canary"):
        CanaryOptions(**{field: value})  # type: ignore[arg-type]  # the values of the table above
