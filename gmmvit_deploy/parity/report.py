"""The report of a parity run as data: `check_parity` returns the report, and ``--json`` and the HTML page show it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from gmmvit_deploy.counts import counted
from gmmvit_deploy.images.data.files import LeftOutKind, left_out_text
from gmmvit_deploy.inference.answer_counts import AnswerCounts
from gmmvit_deploy.inference.precision import QUANTIZED
from gmmvit_deploy.inference.runner_name import RunnerName
from gmmvit_deploy.parity._verdict import Check, Verdict, joined, overall
from gmmvit_deploy.reports.reporting import plain

FORMAT = "gmmvit-parity/1"
GATES = {
    "--gate": "accuracy",
    "--require-accuracy": "accuracy",
    "--keep-decisions": "decisions",
    "--keep-neighbours": "neighbours",
    "--snr-db": "stages",
    "--least-cosine": "stages",
}
"""Option → the check that must be decided if the user types the option."""
SCHEMA_PATH = Path(__file__).with_name("report_schema.json")


def shown_inputs(name: str) -> str:
    """Return the words for a set of inputs, such as ``golden, features``, whose name is that of the JSON report."""
    return name.replace("golden", "reference inputs")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunnerReport:
    """The results of the checks of a runner.

    batches: the sizes of the batches in which it computed all inputs.  provenance: hashes, versions and settings.
    points: three arrays (N,): the margins of the predicted classes, the largest errors of a logit, and True for a flip.
    """

    runner: RunnerName
    batches: tuple[int, ...]
    provenance: Mapping[str, str]
    checks: tuple[Check, ...]
    points: tuple[NDArray[Any], NDArray[Any], NDArray[Any]]

    @property
    def name(self) -> str:
        return str(self.runner)

    @property
    def verdict(self) -> Verdict:
        return overall(self.checks)

    @property
    def nearest_to_limit(self) -> Mapping[str, Any]:
        """The numbers of the check ``numeric`` for the inputs that use the largest part of their limit."""
        sets: list[Mapping[str, Any]] = self.check("numeric").details["sets"]
        return max(sets, key=lambda numbers: numbers["from_exact"]["largest"] / numbers["limit"]["largest"])

    def check(self, name: str) -> Check:
        """Return the check of this name.  Errors: KeyError when the report has no such check."""
        return {check.name: check for check in self.checks}[name]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ParityReport:
    """The results of the checks of a bundle and of the bundle's runners.

    bundle: the path and the hashes of the bundle, and a description of the model.
    data: the name, number and hash of the real images; None without real images.
    answers: PyTorch's answers in float32 to the real images.
    checks: those of the bundle itself.  skipped: runners that were left out, each with the reason.
    """

    bundle: Mapping[str, Any]
    versions: Mapping[str, str]
    data: Mapping[str, Any] | None
    checks: tuple[Check, ...]
    runners: tuple[RunnerReport, ...]
    skipped: tuple[str, ...] = ()
    answers: AnswerCounts = field(default_factory=Counter)

    @property
    def all_checks(self) -> list[tuple[str, Check]]:
        """(name of the runner, check) of each check; ("bundle", check) of the bundle's."""
        of_bundle = [("bundle", check) for check in self.checks]
        return of_bundle + [(one.name, check) for one in self.runners for check in one.checks]

    @property
    def verdict(self) -> Verdict:
        return overall(check for _, check in self.all_checks)

    @property
    def passed(self) -> bool:
        """True if at least one check passed, and no check failed or is undecided."""
        return self.verdict == "passed"

    @property
    def failed(self) -> bool:
        return self.verdict == "failed"

    def left_out(self) -> str:
        """Return a text about copies, and files that are no images of the data, or ""."""
        data = self.data or {}
        kinds = [LeftOutKind(**kind) for kind in data.get("left_out", ())]
        copies = data.get("copies", 0)
        words = [f"with the pixels of another, so not counted: {counted(copies, 'image')}"] if copies else []
        return "; ".join(words + ([left_out_text(kinds)] if kinds else []))

    @property
    def more_images(self) -> str:
        """Return what more images would add where a runner passed by margins, and not by their number, or ""."""
        nearest = {
            who: check.details["nearest_to_changing"]
            for who, check in self.all_checks
            if check.name == "accuracy" and check.details.get("by_margins")
        }
        if not nearest:
            return ""
        share = 100 * max(nearest.values())
        return (
            f"{joined(list(nearest))}: no answer on these images can change: rounding uses at most {share:.2g} % of "
            "what would change one; more images would only look for an image that is nearer to another answer"
        )

    def undecided(self, options: Iterable[str]) -> list[str]:
        """Return ``option: runner: reason`` for each option of `GATES` that could not be decided for a runner."""
        return [
            f"{option}: {runner.runner.name}: {'; '.join(check.reasons)}"
            for option in options
            for runner in self.runners
            for check in [runner.check(GATES[option])]
            if check.verdict in ("undecided", "skipped")
        ]

    @property
    def not_judged(self) -> bool:
        """True if there is an int8 or fp8 graph that no image of the data judged."""
        return any(
            one.runner.precision in QUANTIZED and one.check("stages").verdict == "undecided" for one in self.runners
        )

    def failures(self) -> list[str]:
        """Return `reasons` of all failed checks."""
        return self.reasons("failed")

    def reasons(self, verdict: Verdict, limit: int | None = None) -> list[str]:
        """Return ``runners: check: reason`` of the checks with a verdict.  Runners with the same reason share a line.

        limit: the maximum number of reasons of a check.
        """
        shared: dict[tuple[str, str], list[str]] = defaultdict(list)
        for who, check in self.all_checks:
            reasons = (check.reasons or (check.summary,)) if check.verdict == verdict else ()
            for why in reasons[:limit]:
                shared[check.name, why].append(who)
            if left_out := len(reasons) - len(reasons[:limit]):
                shared[check.name, f"{left_out:,} more reasons; --json lists all"].append(who)
        return [f"{joined(runners)}: {name}: {why}" for (name, why), runners in shared.items()]

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
                    "runner": runner.runner.name,
                    "precision": runner.runner.precision,
                    "cascade": runner.runner.cascade,
                    "batches": list(runner.batches),
                    "provenance": dict(runner.provenance),
                    "verdict": runner.verdict,
                    "checks": [asdict(check) for check in runner.checks],
                }
                for runner in self.runners
            ],
        }
        return plain(data)  # type: ignore[no-any-return]
