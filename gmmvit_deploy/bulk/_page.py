"""Write the report on a complete job as a page."""

from __future__ import annotations

from gmmvit_deploy.bulk._plan import Plan
from gmmvit_deploy.bulk._report import SHOWN, BulkReport
from gmmvit_deploy.images.data.files import left_out_text
from gmmvit_deploy.reports.pages import Summary, rendered

_FEW_CALIBRATION = 50
"""With fewer calibration images, the distance between references says little about real images."""


def page_of(report: BulkReport, plan: Plan, *, name: str) -> str:
    """Return the page as HTML text.  The same job gives the same text.  name: the name of the bundle."""
    errors = sorted(report.errors.items(), key=lambda item: (-item[1][0], item[0]))
    reference = report.reference
    return rendered(
        "bulk/page.html",
        title=f"{report.images:,} images classified by {name}",
        summary=_summary(report, plan),
        shown=SHOWN,
        classes=[
            (label, f"{count:,}", f"{count / report.images:.1%}", f"{total / count:.3f}")
            for label, (count, total) in report.classes.items()
        ],
        confidence=_confidence(report),
        reference=reference,
        unusual_count=f"{report.unusual:,}",
        unusual=[
            (name, f"{distance:.3f}", "yes" if reference and distance > reference.limit else "no", label)
            for distance, name, label in report.most_unusual
        ],
        duplicates=[
            (ids[0], f"{len(ids):,}", ", ".join(ids[1:4]) + (", …" if len(ids) > 4 else ""))
            for ids in report.most_repeated
        ],
        errors=[(error, f"{count:,}", first) for error, (count, first) in errors[:SHOWN]],
        scope=_scope(plan),
    )


def _summary(report: BulkReport, plan: Plan) -> Summary:
    changes = []
    if report.broken:
        changes.append(f"{report.broken:,} images are broken and have no answer; section Errors lists the reasons.")
    if report.unusual:
        changes.append(
            f"{report.unusual:,} images have answers that are unlike those of all images to compare with; "
            "their labels may be wrong, whatever their probabilities are."
        )
    if report.duplicates:
        changes.append(f"{report.duplicates:,} images repeat the content of another image.")
    reference = report.reference
    if reference and reference.calibration < _FEW_CALIBRATION:
        changes.append(
            f"Unusual images were found by comparison with {reference.golden} reference images of the bundle, "
            f"which are generated, and {reference.calibration} calibration images; name images like the expected "
            "images with --calibration."
        )
    if plan.left_out:
        changes.append(f"{left_out_text(plan.left_out)}.")
    changes.append("Images that were added after the start of the job are not part of this report.")
    if report.broken:
        sentence = f"Of {report.images:,} images, {report.images - report.broken:,} have an answer."
        return Summary(outcome="failed", word="BROKEN IMAGES", sentence=sentence, changes=tuple(changes))
    sentence = f"Each of the {report.images:,} images has an answer."
    return Summary(outcome="passed", word="COMPLETE", sentence=sentence, changes=tuple(changes))


def _confidence(report: BulkReport) -> list[tuple[str, ...]]:
    decisions, bins = sum(report.confidence), len(report.confidence)
    if not decisions:
        return []
    return [
        (f"{index / bins:.1f} to {(index + 1) / bins:.1f}", f"{count:,}", f"{count / decisions:.1%}")
        for index, count in enumerate(report.confidence)
    ]


def _scope(plan: Plan) -> dict[str, str]:
    settings = plan.settings
    return {
        "bundle SHA-256": settings.bundle_sha256,
        "source": f"{plan.files:,} files of kind {plan.kind}",
        "SHA-256 of the list of files": plan.listing_sha256,
        "runner": settings.runner,
        "batch": str(settings.batch),
        "shards": f"{len(plan.shards):,}, each of at most {settings.shard_images:,} images",
        **{f"version of {package}": number for package, number in settings.versions.items()},
    }
