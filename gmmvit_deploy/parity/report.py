"""The result of a parity run as data: `check_parity` returns it, ``--json`` prints it, the HTML page shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from gmmvit_deploy.parity.verdict import Check, Verdict, overall
from gmmvit_deploy.reporting import plain

__all__ = ["FORMAT", "SCHEMA_PATH", "ParityReport", "RunnerReport"]

FORMAT = "gmmvit-parity/1"
SCHEMA_PATH = Path(__file__).with_name("report_schema.json")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunnerReport:
    """The checks of a runner.

    provenance: identifies what ran: a graph, a plan or a server.
    points: (margin, largest error, flipped) of every input, for the plot only.
    """

    runner: str
    precision: str
    provenance: Mapping[str, str]
    checks: tuple[Check, ...]
    points: tuple[NDArray[Any], NDArray[Any], NDArray[Any]]

    @property
    def verdict(self) -> Verdict:
        return overall(self.checks)

    def check(self, name: str) -> Check:
        """Return the check of this name.  Errors: KeyError when the report has no such check."""
        return {check.name: check for check in self.checks}[name]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ParityReport:
    """The checks of a bundle and of its runners.

    bundle: hashes and a description of the model.  data: describes the real images; None without images.
    checks: checks of the bundle itself, independent of any runner.
    skipped: runners that were left out, each with the reason.
    """

    bundle: Mapping[str, Any]
    versions: Mapping[str, str]
    data: Mapping[str, Any] | None
    checks: tuple[Check, ...]
    runners: tuple[RunnerReport, ...]
    skipped: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict:
        return overall([*self.checks, *(check for runner in self.runners for check in runner.checks)])

    @property
    def passed(self) -> bool:
        """True if no check failed or is undecided."""
        return self.verdict == "passed"

    @property
    def failed(self) -> bool:
        return self.verdict == "failed"

    def undecided(self, *names: str) -> list[Check]:
        """Return the runners' checks that have one of these names and are undecided or skipped."""
        every = [check for runner in self.runners for check in runner.checks]
        return [check for check in every if check.name in names and check.verdict in ("undecided", "skipped")]

    def failures(self) -> list[str]:
        """Return ``runner: check: reason`` for every reason of every failed check."""
        of_bundle = [f"bundle: {check.name}: {why}" for check in self.checks for why in _reasons(check)]
        return of_bundle + [
            f"{runner.runner}: {check.name}: {why}"
            for runner in self.runners
            for check in runner.checks
            for why in _reasons(check)
        ]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values that follow ``report_schema.json``; numbers that are not finite become null."""
        data = {
            "format": FORMAT,
            "verdict": self.verdict,
            "bundle": dict(self.bundle),
            "versions": dict(self.versions),
            "data": dict(self.data) if self.data is not None else None,
            "skipped": list(self.skipped),
            "checks": [asdict(check) for check in self.checks],
            "runners": [
                {
                    "runner": runner.runner,
                    "precision": runner.precision,
                    "provenance": dict(runner.provenance),
                    "verdict": runner.verdict,
                    "checks": [asdict(check) for check in runner.checks],
                }
                for runner in self.runners
            ],
        }
        return plain(data)  # type: ignore[no-any-return]


def _reasons(check: Check) -> tuple[str, ...]:
    return (check.reasons or (check.summary,)) if check.verdict == "failed" else ()
