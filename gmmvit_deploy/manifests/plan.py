"""How long requests wait in n servers behind a gateway, and how many machines a load needs.

The gateway gives requests to the servers in turn, so the arrivals of each of n servers are more regular than those of
the clients: their squared coefficient of variation is 1/n for Poisson arrivals. Each server has c instances.

    W = C(c, c·ρ) / (c·μ·(1 - ρ)) · (1/n + cs²) / 2         mean wait: Allen and Cunneen's approximation
    P(wait > t) = C(c, c·ρ) · exp(-t · C(c, c·ρ) / W)       an exponential tail with this mean

C: Erlang's probability that a request waits.  ρ: utilisation.  μ = 1/s: rate of an instance.  cs²: squared coefficient
of variation of the service time.  `benchmarks/reported/capacity_plan.py` compares the model with servers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gmmvit_deploy.errors import InputError

__all__ = ["Latency", "Station", "latency", "machines_for", "waiting_probability"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Station:
    """A server.  instances: requests that it computes at the same time.  service_s: of a request, in seconds.
    service_scv: squared coefficient of variation of the service time; 0 for a constant time.
    overhead_s: what gateway and network add to each request, without a queue.
    """

    instances: int
    service_s: float
    service_scv: float = 0.0
    overhead_s: float = 0.0

    @property
    def capacity(self) -> float:
        """Requests a second."""
        return self.instances / self.service_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Of a request, in seconds, with the wait.  utilisation: of the servers."""

    mean_s: float
    p99_s: float
    utilisation: float


def waiting_probability(instances: int, load: float) -> float:
    """Return Erlang's C: the probability that a request waits.  load: rate · service time, less than ``instances``."""
    blocked = 1.0
    for number in range(1, instances + 1):
        blocked = load * blocked / (number + load * blocked)
    utilisation = load / instances
    return blocked / (1 - utilisation + utilisation * blocked)


def latency(station: Station, rate: float, servers: int) -> Latency:
    """Return the latency of ``servers`` equal servers at a rate of requests a second.

    Errors: InputError when the rate is not below the capacity: the wait would grow without end.
    """
    utilisation = rate / (servers * station.capacity)
    if not 0 < utilisation < 1:
        raise InputError(
            f"expected a rate above 0 and below the capacity of {servers * station.capacity:g} requests a second, "
            f"got {rate:g}"
        )
    waits = waiting_probability(station.instances, utilisation * station.instances)
    variation = (1 / servers + station.service_scv) / 2
    mean_wait = waits / (station.capacity * (1 - utilisation)) * variation
    p99_wait = max(0.0, math.log(waits / 0.01) * mean_wait / waits)
    fixed = station.service_s + station.overhead_s
    return Latency(mean_s=fixed + mean_wait, p99_s=fixed + p99_wait, utilisation=utilisation)


def machines_for(rate: float, rate_of_machine: float, *, spare: int = 1) -> int:
    """Return the number of machines for a rate, if each answers ``rate_of_machine`` within its limit.

    ``gmmvit tune`` measures the rate of a machine.  spare: machines that may be away at the same time.
    """
    if rate <= 0 or rate_of_machine <= 0:
        raise InputError(f"expected rates above 0, got {rate:g} and {rate_of_machine:g}")
    return math.ceil(rate / rate_of_machine) + spare
