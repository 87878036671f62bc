"""Write the report on a complete job as a page."""

from __future__ import annotations

from html import escape

from gmmvit_deploy.bulk.plan import Plan
from gmmvit_deploy.bulk.report import SHOWN, BulkReport, Reference
from gmmvit_deploy.reports.pages import Summary, definitions, folded, page, section, table

__all__ = ["page_of"]

_FEW_CALIBRATION = 50
"""With fewer calibration images, the distance between references says little about real images."""


def page_of(report: BulkReport, plan: Plan, *, name: str) -> str:
    """Return the page as HTML text.  The same job gives the same text.  name: the name of the bundle."""
    reference = report.reference
    return page(
        kind="Bulk report: what was classified?",
        title=f"{report.images:,} images classified by {name}",
        summary=_summary(report),
        sections=(
            section("Classes", _classes(report), _confidence(report)),
            section("Unusual images", _unusual(report, reference) if reference else ""),
            section("Images with the same content", _duplicates(report)),
            section("Errors", _errors(report)),
            section("Scope", definitions(_scope(plan))),
        ),
    )


def _summary(report: BulkReport) -> Summary:
    changes = []
    if report.broken:
        changes.append(f"{report.broken:,} images are broken and have no answer; section Errors lists the reasons.")
    if report.unusual:
        changes.append(
            f"{report.unusual:,} images have answers that are unlike those of all reference images; their labels may "
            "be wrong, whatever their probabilities are."
        )
    if report.duplicates:
        changes.append(f"{report.duplicates:,} images repeat the content of another image.")
    reference = report.reference
    if reference and reference.calibration < _FEW_CALIBRATION:
        changes.append(
            f"Unusual images were found by comparison with {reference.golden} golden images, which are generated, and "
            f"{reference.calibration} calibration images; name images like the expected images with --calibration."
        )
    changes.append("Images that were added after the start of the job are not part of this report.")
    if report.broken:
        sentence = f"Of {report.images:,} images, {report.images - report.broken:,} have an answer."
        return Summary(outcome="failed", word="BROKEN IMAGES", sentence=sentence, changes=tuple(changes))
    sentence = f"Each of the {report.images:,} images has an answer."
    return Summary(outcome="passed", word="COMPLETE", sentence=sentence, changes=tuple(changes))


def _classes(report: BulkReport) -> str:
    rows = [
        (escape(label), f"{count:,}", f"{count / report.images:.1%}", f"{total / count:.3f}")
        for label, (count, total) in report.classes.items()
    ]
    head = ("class", "images", "share", "mean probability")
    shown = table("Images of each class, the most frequent first", head, rows[:SHOWN]) if rows else ""
    more = rows[SHOWN:]
    return shown + folded("Other classes", len(more), table("Images of the other classes", head, more) if more else "")


def _confidence(report: BulkReport) -> str:
    decisions = sum(report.confidence)
    if not decisions:
        return ""
    bins = len(report.confidence)
    rows = [
        (f"{index / bins:.1f} to {(index + 1) / bins:.1f}", f"{count:,}", f"{count / decisions:.1%}")
        for index, count in enumerate(report.confidence)
    ]
    return table("Confidence: the probability of the label", ("probability", "labels", "share"), rows)


def _unusual(report: BulkReport, reference: Reference) -> str:
    what = (
        f"<p>The {escape(reference.output)} of each image, scaled to length 1, are compared with those of "
        f"{reference.golden} golden images and {reference.calibration} calibration images. The distance is that to the "
        f"nearest of them. {report.unusual:,} images are farther than {reference.limit:.3f}, the largest distance of a "
        f"{'calibration' if reference.calibration else 'golden'} image to the nearest other of them.</p>"
    )
    rows = [
        (escape(name), f"{distance:.3f}", "yes" if distance > reference.limit else "no", escape(label))
        for distance, name, label in report.most_unusual
    ]
    head = ("image", "distance", "beyond the limit", "label")
    return what + (table("The images with the largest distances", head, rows) if rows else "")


def _duplicates(report: BulkReport) -> str:
    if not report.most_repeated:
        return "<p>No two images have the same content.</p>"
    rows = [
        (escape(ids[0]), f"{len(ids):,}", escape(", ".join(ids[1:4])) + (", …" if len(ids) > 4 else ""))
        for ids in report.most_repeated
    ]
    return table("The contents that occur most often", ("first image", "images", "further images"), rows)


def _errors(report: BulkReport) -> str:
    if not report.errors:
        return "<p>No image is broken.</p>"
    ordered = sorted(report.errors.items(), key=lambda item: (-item[1][0], item[0]))
    rows = [(escape(error), f"{count:,}", escape(first)) for error, (count, first) in ordered[:SHOWN]]
    return table("The most frequent errors", ("error", "images", "first image"), rows)


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
