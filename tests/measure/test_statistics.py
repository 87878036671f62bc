"""Percentiles need enough queries, and an interval holds what it promises."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from gmmvit_deploy.measure.statistics import ENOUGH, ROUNDS_OF_PROOF, percentiles, ratio, ratio_of_medians, spread


def test_percentiles_are_quoted_on_enough_queries_only() -> None:
    assert (ENOUGH[0.9], ENOUGH[0.99], ENOUGH[0.999]) == (64, 662, 6636)
    for name, (share, enough) in zip(("p50", "p90", "p99", "p99.9"), ENOUGH.items(), strict=True):
        few, many = (percentiles(np.arange(1.0, count + 1))[name] for count in (enough - 1, enough))
        assert few == {"ms": None, "missing_queries": 1}
        assert many == {"ms": np.ceil(share * enough), "missing_queries": 0}


def test_ratios_are_taken_within_rounds() -> None:
    drifting = np.array([1.0, 2.0, 4.0, 8.0, 16.0])
    relative = ratio(list(1.5 * drifting), list(drifting))
    assert relative.value == relative.low == relative.high == 1.5
    with pytest.raises(ValueError, match="expected the same number of rounds"):
        ratio([1.0], [1.0, 2.0])
    assert spread([1.0, 1.0, 1.0]) == 0
    assert spread([1.0, 2.0, 3.0]) == 0.5


@pytest.mark.parametrize("rounds", range(ROUNDS_OF_PROOF, 13))
def test_of_equal_programs_five_percent_seem_different(rounds: int) -> None:
    """Of all outcomes in which each program is as often the faster one, at most 5 % have an interval without 1."""
    differences = 0.01 * np.arange(1, rounds + 1)
    intervals = [ratio(1 + differences * signs, np.ones(rounds)) for signs in product((-1, 1), repeat=rounds)]
    assert 0 < sum(not each.low <= 1 <= each.high for each in intervals) / len(intervals) <= 0.05


def test_too_few_rounds_show_all_ratios() -> None:
    few = ratio([1.0, 2.0, 3.0, 4.0, 5.0], np.ones(5))
    assert (few.low, few.value, few.high) == (1, 3, 5)


def test_runs_of_different_times_are_compared_by_their_medians() -> None:
    generator = np.random.default_rng(0)
    equal = [ratio_of_medians(*np.exp(0.1 * generator.standard_normal((2, 10)))) for _ in range(400)]
    assert np.mean([not each.low <= 1 <= each.high for each in equal]) <= 0.05
    slower = ratio_of_medians([2.1, 2.0, 2.2, 2.0, 1.9, 2.0, 2.0, 9.0, 2.0, 2.0], [1.0] * 10)
    assert (slower.value, slower.low, slower.high) == (2.0, 2.0, 2.2)
