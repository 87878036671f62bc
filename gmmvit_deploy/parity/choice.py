"""The check ``choice``: does the runner that ``gmmvit optimize`` chose on this kind of machine still hold?

It names the versions that changed since, and fails if the chosen runner fails another check or misses the gate now. It
is undecided if the runner cannot run here, was not among the runners of this run, or was judged without images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.parity._verdict import Check, Verdict
from gmmvit_deploy.runtimes.runners.chosen import choice_of_this_machine, choose_runner, runtime_versions

if TYPE_CHECKING:
    from gmmvit_deploy.bundle.artifacts import Bundle
    from gmmvit_deploy.bundle.choices import Choice
    from gmmvit_deploy.parity.report import ParityReport, RunnerReport

__all__ = ["with_choice"]


def with_choice(bundle: Bundle, report: ParityReport) -> ParityReport:
    """Return the report with the check ``choice``, if a choice with a gate was made on this kind of machine."""
    check = _checked(bundle, report.runners)
    return report if check is None else replace(report, checks=(*report.checks, check))


def _checked(bundle: Bundle, runners: Sequence[RunnerReport]) -> Check | None:
    """Compare versions with those of the choice, and judge the chosen runner by its other checks and by the gate."""
    choice, _ = choice_of_this_machine(bundle)
    if choice is None or choice.gate is None or not choice.passed:
        return None
    chosen, best = choose_runner(bundle), choice.passed[0]
    changed = _changed(choice)
    report = next((r for r in runners if (r.runner, r.precision) == (chosen.runner, chosen.precision)), None)
    now = _judged_now(choice, report)
    words = f"{chosen.label}, chosen {choice.made_at[:10]}"
    words += f"; changed since: {', '.join(changed)}" if changed else "; versions as then"
    if best.judged is not None and best.label == chosen.label and now is not None:
        words += f"; {choice.gate.kind} {best.judged.value:.4f} then, {now:.4f} now"
    broken = (
        [f"{check.name}: {check.reasons[0]}" for check in report.checks if check.verdict == "failed"] if report else []
    )
    if now is not None and now < choice.gate.least:
        broken.append(f"{choice.gate.kind} {now:.4f}, below the gate {choice.gate.least:g}")
    open_questions = list(chosen.notes)
    if changed and report is None:
        open_questions.append(f"add {chosen.label} to --runner to judge it with what is installed now")
    elif changed and now is None and choice.images is not None:
        open_questions.append(f"type --data {choice.images.source} to hold it to the gate {choice.gate.least:g} again")
    verdict: Verdict = "failed" if broken else "undecided" if open_questions else "passed"
    if broken:
        broken.append(f"type gmmvit optimize {bundle.path} to choose again")
    return Check(
        name="choice",
        verdict=verdict,
        summary=words,
        reasons=(*broken, *open_questions),
        details={"runner": chosen.label, "best": best.label, "made_at": choice.made_at, "changed": changed, "now": now},
    )


def _changed(choice: Choice) -> list[str]:
    """Return ``openvino 1 → 2`` for each version that differs from that of the choice."""
    now = runtime_versions()
    names = dict.fromkeys([*choice.versions, *now])
    return [
        f"{name} {choice.versions.get(name, 'absent')} → {now.get(name, 'absent')}"
        for name in names
        if choice.versions.get(name) != now.get(name)
    ]


def _judged_now(choice: Choice, report: RunnerReport | None) -> float | None:
    """Return the value that the gate judges, measured in this run; None without images that show it."""
    if report is None or choice.gate is None:
        return None
    if choice.gate.kind == "kept decisions":
        agreement: float | None = report.check("decisions").details.get("agreement")
        return agreement
    details: Mapping[str, Any] = report.check("accuracy").details
    shares = details.get("top1") or details.get("all_right")
    return shares["runner"] / shares["pytorch"] if shares and shares["pytorch"] else None
