"""The result of a check, and the overall verdict of several checks.

passed     the check detected no error
failed     the check detected an error; the process ends with status 1
undecided  the check detected no error, but had too little data to pass
skipped    the check did not run, because it was not requested, did not apply, or had no data; the summary names the
           reason
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

    name: the name of the check, as listed at the head of ``parity/check.py``.  summary: the result in a single line.
    reasons: why the check did not pass; each reason is a single line.  details: the measurements, as plain JSON values.
    """

    name: str
    verdict: Verdict
    summary: str
    reasons: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)


def overall(checks: Iterable[Check]) -> Verdict:
    """Return ``failed`` if any check failed, else ``undecided`` if any check is undecided, else ``passed``.

    If every check was skipped, the overall verdict is also ``failed``, because a skipped check verifies nothing.
    """
    verdicts = {check.verdict for check in checks}
    if "failed" in verdicts or not verdicts & {"passed", "undecided"}:
        return "failed"
    return "undecided" if "undecided" in verdicts else "passed"


def skipped_check(name: str, why: str) -> Check:
    """Return a check that did not run.  why: the reason."""
    return Check(name=name, verdict="skipped", summary=why, reasons=(why,))
