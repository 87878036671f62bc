from __future__ import annotations

import math

import pytest

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.manifests.plan import Station, latency, machines_for, waiting_probability


def test_the_waiting_probability_is_erlangs() -> None:
    assert waiting_probability(1, 0.7) == pytest.approx(0.7)  # M/M/1: the utilisation
    load, instances = 3.2, 4
    direct = load**instances / math.factorial(instances) / (1 - load / instances)
    total = sum(load**k / math.factorial(k) for k in range(instances)) + direct
    assert waiting_probability(instances, load) == pytest.approx(direct / total)


def test_a_server_with_exponential_times_is_mm1() -> None:
    """Mean time in M/M/1: 1 / (μ - λ); 99 % of the requests within log(100) times the mean."""
    result = latency(Station(instances=1, service_s=0.1, service_scv=1.0), rate=5.0, servers=1)
    assert result.mean_s == pytest.approx(1 / (10 - 5))
    assert result.p99_s - 0.1 == pytest.approx(math.log(0.5 / 0.01) / (10 - 5))


def test_a_constant_time_halves_the_wait_and_turns_shorten_it() -> None:
    constant, random = (Station(instances=1, service_s=0.1, service_scv=scv) for scv in (0.0, 1.0))

    def wait(station: Station, servers: int) -> float:
        return latency(station, rate=8.0 * servers, servers=servers).mean_s - 0.1

    assert wait(constant, 1) == pytest.approx(wait(random, 1) / 2)
    assert wait(constant, 4) == pytest.approx(wait(constant, 1) / 4)


def test_at_the_capacity_there_is_no_answer() -> None:
    with pytest.raises(InputError, match="below the capacity of 40"):
        latency(Station(instances=2, service_s=0.1), rate=40.0, servers=2)


@pytest.mark.parametrize(("rate", "expected"), [(1, 2), (400, 2), (401, 3), (4000, 11)])
def test_machines(rate: float, expected: int) -> None:
    assert machines_for(rate, 400.0) == expected
