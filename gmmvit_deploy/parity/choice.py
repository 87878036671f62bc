"""The check ``choice``: does the runner that ``gmmvit optimize`` chose on this kind of machine still hold?

It names the versions that changed since, of what the chosen runner loads. It fails if the runner fails another check or
misses the gate now, on the images of the choice. It is undecided if the runner cannot run here, if these images are too
few, or, after a change, if the runner was not among those of this run or these images were not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gmmvit_deploy.parity._verdict import Check, Verdict
from gmmvit_deploy.parity.judgement import Judgement, failed_checks, judgement_of
from gmmvit_deploy.runtimes.runners.chosen import changed_versions, choice_of_this_machine, choose_runner

if TYPE_CHECKING:
    from gmmvit_deploy.bundle.artifacts import Bundle
    from gmmvit_deploy.parity.report import ParityReport


def with_choice(bundle: Bundle, report: ParityReport) -> ParityReport:
    """Return the report with the check ``choice``, if a choice with a gate was made on this kind of machine."""
    check = _checked(bundle, report)
    return report if check is None else replace(report, checks=(*report.checks, check))


def _checked(bundle: Bundle, parity: ParityReport) -> Check | None:
    choice, _ = choice_of_this_machine(bundle)
    if choice is None or choice.gate is None or choice.images is None or not choice.passed:
        return None
    gate, images = choice.gate, choice.images
    chosen, best = choose_runner(bundle), choice.passed[0]
    runner = chosen.runner
    changed = changed_versions(choice, runner)
    report = next((each for each in parity.runners if runner in (each.runner, replace(each.runner, form=""))), None)
    same_images = (parity.data or {}).get("sha256") == images.sha256
    judgement = judgement_of(report, gate) if report is not None and same_images else Judgement()
    now = judgement.judged.value if judgement.judged is not None else None
    words = f"{runner}, chosen {choice.made_at[:10]}"
    words += f"; changed since: {', '.join(changed)}" if changed else "; versions as then"
    if best.judged is not None and best.runner == runner and now is not None:
        words += f"; {gate.kind} {best.judged.value:.4f} then, {now:.4f} now"
    broken = failed_checks(report) if report else []
    open_questions = list(chosen.notes) if runner != best.runner else []
    if now is not None and judgement.why_not and not broken:
        (broken if now < gate.min_share else open_questions).append(judgement.why_not)
    if changed and report is None:
        open_questions.append(f"add {runner} to --runner to judge it with what is installed now")
    elif changed and not (same_images and (runner.precision == "fp32" or now is not None)):
        same = f"--data {images.source} --limit {images.count + images.copies}"
        open_questions.append(f"type {same}, the images of the choice, to hold it to the gate {gate.min_share:g} again")
    verdict: Verdict = "failed" if broken else "undecided" if open_questions else "passed"
    if broken:
        broken.append(f"type gmmvit optimize {bundle.path} to choose again")
    return Check(
        name="choice",
        verdict=verdict,
        summary=words,
        reasons=(*broken, *open_questions),
        details={
            "runner": str(runner),
            "best": str(best.runner),
            "made_at": choice.made_at,
            "changed": changed,
            "now": now,
        },
    )
