"""The result of a check, and the overall verdict of several checks.

failed     the check detected an error; the process ends with status 1
undecided  the check detected no error, but had too little data to pass
skipped    the check could not run here or was not requested; the reason is given
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Check", "Verdict", "overall"]

Verdict = Literal["passed", "failed", "undecided", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The result of a check.

    name: as listed at the head of ``parity/check.py``.  summary: the result in a single line.
    reasons: why the check did not pass, as single lines.  details: the numbers, as plain JSON values.
    """

    name: str
    verdict: Verdict
    summary: str
    reasons: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)


def overall(checks: Iterable[Check]) -> Verdict:
    """Return ``failed`` if any check failed, else ``undecided`` if any check is undecided, else ``passed``.

    Returns ``failed`` also if every check was skipped, because skipped checks prove nothing.
    """
    verdicts = {check.verdict for check in checks}
    if "failed" in verdicts or not verdicts & {"passed", "undecided"}:
        return "failed"
    return "undecided" if "undecided" in verdicts else "passed"
