"""Decide whether a canary, a new server that gets a share of the traffic, is as good as the old server.

    errors     p = P(X ≥ failures of the canary), X ~ Hypergeometric(all requests, all failures, its requests);
               the canary fails if p < 0.01 and its share of failures is higher
    latency    mean time of the canary / mean time of the old server; the canary fails above `CanaryOptions.slower`
    decisions  share of the images for which both servers give the same label; below `CanaryOptions.agreement` the
               canary fails

The counts are those of the gateway's access log (`traffic`), over gRPC and HTTP. Without requests of clients, the
canary fails after `CanaryOptions.timeout_s`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gmmvit_deploy.errors import InputError

__all__ = ["CanaryOptions", "Counts", "Verdict", "canary_verdict", "failure_probability", "share_from"]

_UNLIKELY = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryOptions:
    """Options of a canary.

    share: the share of the traffic that the new server gets, above 0 and below 1.
    requests: the number of requests that the new server must answer before the verdict.
    timeout_s: the maximum time for these requests, in seconds; the canary fails afterwards.
    slower: the largest ratio of the mean times, new / old.
    agreement: the smallest share of the canary images with the same label from both servers.
    Errors: InputError when a value is outside its range.
    """

    share: float = 0.05
    requests: int = 200
    timeout_s: float = 600.0
    slower: float = 1.5
    agreement: float = 0.95

    def __post_init__(self) -> None:
        for name, value, valid, expected, example in (
            ("--canary", self.share, 0.0 < self.share < 1.0, "a share above 0% and below 100%", "5%"),
            ("--canary-requests", self.requests, self.requests >= 1, "at least 1", "200"),
            ("--canary-timeout", self.timeout_s, self.timeout_s > 0, "a time above 0 seconds", "600"),
            ("--canary-slower", self.slower, self.slower > 0, "a ratio above 0", "1.5"),
            ("--canary-agreement", self.agreement, 0.0 <= self.agreement <= 1.0, "a share from 0 to 1", "0.95"),
        ):
            if not valid:
                likely = f"{value / 100:g}" if name == "--canary-agreement" and 1 < value <= 100 else example
                raise InputError(f"{name}: expected {expected}, got {value:g}", hint=f"type {name} {likely}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What a server did during the canary.

    answered, failed: the numbers of requests that were answered, and that got an error or no answer.
    time_us: the sum of the times of the answered requests, in microseconds.
    """

    answered: int
    failed: int
    time_us: int

    @property
    def mean_ms(self) -> float:
        """Mean time of an answered request in milliseconds; NaN without requests."""
        return self.time_us / self.answered / 1000 if self.answered else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The verdict on a canary.  good: True if the canary passed.  reasons: a sentence for each comparison."""

    good: bool
    reasons: tuple[str, ...]


def share_from(text: str) -> float:
    """Convert ``5%`` or ``0.05`` to a share.  Errors: InputError for other text, and for a share outside 0 to 1."""
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        share = math.nan
    if 0.0 < share < 1.0:
        return share
    likely = f"{share:g}" if 1.0 <= share < 100.0 and not text.endswith("%") else "5"
    raise InputError(
        f"--canary: expected a share above 0% and below 100%, such as 5%, got {text!r}", hint=f"type --canary {likely}%"
    )


def canary_verdict(old: Counts, new: Counts, options: CanaryOptions) -> Verdict:
    """Compare what both servers did in the same time."""
    chance = failure_probability(old, new)
    more = _share(new) > _share(old)
    errors_good = not (more and chance < _UNLIKELY)
    reasons = [
        f"errors: {new.failed} of {new.failed + new.answered} requests failed in the new server, {old.failed} of "
        f"{old.failed + old.answered} in the old server (p = {chance:.2g})"
    ]
    if not old.answered or not new.answered:
        return Verdict(good=errors_good and bool(new.answered), reasons=(*reasons, "latency: no times to compare"))
    ratio = new.mean_ms / old.mean_ms if old.time_us else math.inf
    reasons.append(
        f"latency: {new.mean_ms:.2f} ms in the new server, {old.mean_ms:.2f} ms in the old server: {ratio:.2f} times, "
        f"at most {options.slower:g} allowed"
    )
    return Verdict(good=errors_good and ratio <= options.slower, reasons=tuple(reasons))


def failure_probability(old: Counts, new: Counts) -> float:
    """Return the probability of so many failures in the canary or more, if both servers fail equally often.

    It is the upper tail of the hypergeometric distribution (Fisher's exact test, one-sided).
    """
    drawn = new.answered + new.failed
    everything = drawn + old.answered + old.failed
    failures = new.failed + old.failed
    highest = min(drawn, failures)
    logs = [_log_hypergeometric(k, everything, failures, drawn) for k in range(new.failed, highest + 1)]
    return min(1.0, math.fsum(math.exp(log) for log in logs))


def _log_hypergeometric(k: int, everything: int, failures: int, drawn: int) -> float:
    if drawn - k > everything - failures:
        return -math.inf
    chosen = _log_choose(failures, k) + _log_choose(everything - failures, drawn - k)
    return chosen - _log_choose(everything, drawn)


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _share(counts: Counts) -> float:
    return counts.failed / max(1, counts.failed + counts.answered)
