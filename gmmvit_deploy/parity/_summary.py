"""Summarise a parity report in a sentence for the person who approves it, and list what would change the verdict."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gmmvit_deploy.parity._verdict import Check
from gmmvit_deploy.parity.report import ParityReport, RunnerReport
from gmmvit_deploy.reports.pages import Summary

__all__ = ["summary_of"]

_MOST_REASONS = 8
"""Maximum number of reasons of each check in the summary; the page lists all reasons below the summary."""


def summary_of(report: ParityReport) -> Summary:
    """Return the verdict and what would change the verdict: failed checks, undecided checks, or the nearest limits."""
    ran = [check for _, check in _checks(report) if check.verdict != "skipped"]
    failed = [(who, check) for who, check in _checks(report) if check.verdict == "failed"]
    undecided = [(who, check) for who, check in _checks(report) if check.verdict == "undecided"]
    if report.verdict == "failed":
        culprits = _joined(list(dict.fromkeys(who for who, _ in failed)))
        sentence = f"Do not deploy {culprits}: {len(failed)} of {len(ran)} checks failed."
        if not failed:
            sentence = "Do not deploy anything: no check ran."
        changes = (*_reasons(failed), *_scope(report))
        return Summary(outcome="failed", word="FAILED", sentence=sentence, changes=changes)
    runners = _joined([_name(runner) for runner in report.runners])
    if report.verdict == "undecided":
        sentence = (
            f"No check failed for {runners}, but {len(undecided)} of {len(ran)} checks had too little data to decide: "
            "approve only if the reasons below are acceptable."
        )
        changes = (*_reasons(undecided), *_scope(report))
        return Summary(outcome="undecided", word="UNDECIDED", sentence=sentence, changes=changes)
    sentence = f"{runners} can stand in for the trained PyTorch model: all {len(ran)} checks that ran passed."
    near = tuple(line for runner in report.runners for line in _nearest_limits(runner))
    return Summary(outcome="passed", word="PASSED", sentence=sentence, changes=(*near, *_scope(report)))


def _checks(report: ParityReport) -> Iterator[tuple[str, Check]]:
    """Yield (name of the runner, check); for checks of the bundle itself the name is "bundle"."""
    yield from (("bundle", check) for check in report.checks)
    yield from ((_name(runner), check) for runner in report.runners for check in runner.checks)


def _reasons(checks: Sequence[tuple[str, Check]]) -> Iterator[str]:
    """Yield lines ``runners: check: reason``.  Runners with the same reason share a line."""
    shared: dict[tuple[str, str], list[str]] = defaultdict(list)
    for who, check in checks:
        reasons = check.reasons or (check.summary,)
        for why in reasons[:_MOST_REASONS]:
            shared[check.name, why].append(who)
        if len(reasons) > _MOST_REASONS:
            shared[check.name, f"and {len(reasons) - _MOST_REASONS:,} more reasons, listed below"].append(who)
    for (name, why), runners in shared.items():
        yield f"{_joined(runners)}: {name}: {why}"


def _name(runner: RunnerReport) -> str:
    return f"{runner.runner} in {runner.computes_in}"


def _nearest_limits(runner: RunnerReport) -> Iterator[str]:
    """Yield lines that state how close the results of a runner that passed are to the limits."""
    checks = {check.name: check for check in runner.checks}
    sets = checks["numeric"].details["sets"] if "numeric" in checks else []
    if sets:
        worst = max(sets, key=lambda numbers: numbers["from_exact"]["largest"] / numbers["limit"]["largest"])
        largest, limit = worst["from_exact"]["largest"], worst["limit"]["largest"]
        yield (
            f"{_name(runner)}: logits differ by at most {largest:.2g} from {worst['reference']} "
            f"(inputs: {worst['inputs']}, batch {worst['batch']}); the numeric check fails above {limit:.2g}, and "
            f"{largest / limit:.0%} of this limit is used"
        )
    details = checks["decisions"].details if "decisions" in checks else {}
    if details.get("nearest_to_flipping") is not None:
        yield f"{_name(runner)}: {_flip_words(details)}"
    accuracy = checks["accuracy"].details if "accuracy" in checks else {}
    if accuracy:
        what, pairs = (
            ("top-1 accuracy", accuracy["top1"]) if "top1" in accuracy else ("all labels right", accuracy["all_right"])
        )
        low = pairs["interval"][0]
        yield (
            f"{_name(runner)}: the difference of {what} from PyTorch's is at least {low:+.2%} "
            "(lower end of its interval); "
            f"the accuracy check passes only at {accuracy['lowest_difference_allowed']:+.3%} or above"
        )


def _flip_words(details: Mapping[str, Any]) -> str:
    share = details["nearest_to_flipping"]
    if share > 1:
        return (
            f"the largest error is {share:.1f} times the error that may change a predicted class; "
            f"{details['flips_within_noise']} of {details['inputs']:,} predicted classes flipped, all within the noise"
        )
    return (
        f"the largest error is {100 * share:.2g} % of the error that may change a predicted class, "
        f"on {details['inputs']:,} inputs"
    )


def _scope(report: ParityReport) -> Iterator[str]:
    skipped = len(report.skipped) + sum(check.verdict == "skipped" for _, check in _checks(report))
    if skipped:
        yield f"Skipped checks and runners ({skipped}, listed below with the reasons) may fail once they run"
    yield "Another bundle, engine, server, machine or version may fail: the verdict covers only what “Scope” lists"


def _joined(names: list[str]) -> str:
    """Join names with commas, and with "and" before the last."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
