"""What a check found, and what all of them come to.

failed     something is wrong; the process ends with 1
undecided  nothing was found wrong, and too little was seen to call it right
skipped    it could not be run here, or was not asked for; the reason is given
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Check", "Verdict", "overall"]

Verdict = Literal["passed", "failed", "undecided", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """name: of the check, as in `CHECKS`.  says: what was seen, in one line.

    reasons: why it did not pass, one line each.  details: the numbers, as plain JSON values.
    """

    name: str
    verdict: Verdict
    says: str
    reasons: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)


def overall(checks: Iterable[Check]) -> Verdict:
    """Failed if any failed, else undecided if any was, else passed; nothing at all is a failure."""
    verdicts = {check.verdict for check in checks}
    if "failed" in verdicts or not verdicts & {"passed", "undecided"}:
        return "failed"
    return "undecided" if "undecided" in verdicts else "passed"
