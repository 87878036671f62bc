"""The result of a check, and the overall verdict of several checks.

passed     the check detected no error
failed     the check detected an error; the process ends with status 1
undecided  the check detected no error, but had too little data to pass
skipped    the check did not run, because it was not requested, did not apply, or had no data; the summary names the
           reason
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Verdict = Literal["passed", "failed", "undecided", "skipped"]
SEVERITY: tuple[Verdict, ...] = ("skipped", "passed", "undecided", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The result of a check.

    name: the name of the check, as listed at the head of ``parity/check.py``.  summary: the result in a single line.
    reasons: why the check did not pass; each reason is a single line.  details: the measurements, as plain JSON values.
    """

    name: str
    verdict: Verdict
    summary: str
    reasons: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)


def overall(checks: Iterable[Check]) -> Verdict:
    """Return the worst verdict; ``failed`` if every check was skipped, because a skipped check verifies nothing."""
    worst = max((check.verdict for check in checks), key=SEVERITY.index, default=SEVERITY[0])
    return "failed" if worst == "skipped" else worst


def worst_of(checks: Mapping[int, Check], value: Callable[[Mapping[str, Any]], float]) -> Check:
    """Return the check of the batch size at which a runner is judged worst, with the verdict at each size.

    checks: size of the batches → the same check of the same images.
    value: the measured value in the details of a check, the higher the better, which decides between equal verdicts.
    """

    def rank(size: int) -> tuple[int, float]:
        check = checks[size]
        measured = value(check.details) if check.details else 0.0
        return -SEVERITY.index(check.verdict), -math.inf if math.isnan(measured) else measured

    worst = min(checks, key=rank)
    check = checks[worst]
    if not check.details:
        return check
    sizes = " and ".join(map(str, checks))
    same = len({each.summary for each in checks.values()}) == 1
    return replace(
        check,
        summary=f"{check.summary}; {f'at batch {sizes}' if same else f'at batch {worst}, the worst of {sizes}'}",
        details={
            **check.details,
            "batch": worst,
            "batches": [
                {"batch": size, "verdict": each.verdict, "summary": each.summary} for size, each in checks.items()
            ],
        },
    )


def passed_unless(reasons: Sequence[str], name: str, summary: str, **details: Any) -> Check:
    """Return a check that failed if there are reasons, else passed."""
    verdict: Verdict = "failed" if reasons else "passed"
    return Check(name=name, verdict=verdict, summary=summary, reasons=tuple(reasons), details=details)


def skipped_check(name: str, why: str) -> Check:
    return Check(name=name, verdict="skipped", summary=why, reasons=(why,))


def joined(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
