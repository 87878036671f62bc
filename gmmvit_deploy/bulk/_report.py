"""The report on a complete job: classes, confidence, errors, and duplicates."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from gmmvit_deploy.bulk._plan import Plan
from gmmvit_deploy.bulk._shard import opened_shard
from gmmvit_deploy.bulk._storage import Storage
from gmmvit_deploy.counts import counted
from gmmvit_deploy.images.data.files import left_out_text
from gmmvit_deploy.reports.pages import Summary, rendered

_SHOWN = 20
"""The number of classes, duplicates and errors that the report shows."""
_BINS = 10
_MAX_ERRORS = 1000
"""Distinct errors that are counted apart: messages of decoders can contain numbers."""
_FEW_BROKEN = 0.01
"""The maximum share of broken images with which the verdict is not a failure."""
_ROWS_AT_ONCE = 4096


@dataclass(slots=True, kw_only=True)
class BulkReport:
    """Numbers of a job.

    classes: label → (images, sum of their probabilities).  confidence: images in each tenth of the probability.
    errors: message → (images, id of the first).  duplicates: images whose content occurred before.
    most_repeated: ids of the images of a content, for the contents that occur most often.
    """

    images: int = 0
    broken: int = 0
    classes: dict[str, tuple[int, float]] = field(default_factory=dict)
    confidence: list[int] = field(default_factory=lambda: [0] * _BINS)
    errors: dict[str, tuple[int, str]] = field(default_factory=dict)
    duplicates: int = 0
    most_repeated: list[list[str]] = field(default_factory=list)


def report_of(storage: Storage, plan: Plan) -> BulkReport:
    """Read all shards of a complete job, a few rows at a time.

    In memory stay 16 bytes for each image, with which equal contents are found.
    Errors: InputError when a shard is damaged.
    """
    import numpy as np

    report = BulkReport()
    counts: Counter[str] = Counter()
    sums: defaultdict[str, float] = defaultdict(float)
    hashes = []
    for rows in _batches(storage, plan, ["id", "sha256", "error", "label", "probability"]):
        report.images += rows.num_rows
        columns = rows.to_pydict()
        hashes += [bytes.fromhex(digest)[:16] for digest in columns["sha256"] if digest]
        _count_errors(report, columns["id"], columns["error"])
        for label, probability in _decisions(columns):
            counts[label] += 1
            sums[label] += probability
            report.confidence[min(int(probability * _BINS), _BINS - 1)] += 1
    report.classes = {label: (count, sums[label]) for label, count in counts.most_common()}
    content, occurrences = np.unique(np.array(hashes, "V16"), return_counts=True)
    report.duplicates = int((occurrences - 1).sum())
    often = np.argsort(-occurrences, kind="stable")[:_SHOWN]
    repeated = [content[index].tobytes() for index in often if occurrences[index] > 1]
    if repeated:
        report.most_repeated = _ids_of(storage, plan, repeated)
    return report


def _batches(storage: Storage, plan: Plan, columns: list[str]) -> Iterator[Any]:
    for record in plan.shards:
        with opened_shard(storage, record.number) as shard:
            yield from shard.iter_batches(_ROWS_AT_ONCE, columns=columns)


def _count_errors(report: BulkReport, ids: list[str], errors: list[str | None]) -> None:
    for name, error in zip(ids, errors, strict=True):
        if error is None:
            continue
        report.broken += 1
        key = error if error in report.errors or len(report.errors) < _MAX_ERRORS else "other errors"
        count, first = report.errors.get(key, (0, name))
        report.errors[key] = (count + 1, first)


def _decisions(columns: dict[str, list[Any]]) -> Iterator[tuple[str, float]]:
    """Yield (label, probability) of each image; of a multi-label network, of each label that reaches its threshold."""
    for label, probability in zip(columns.get("label", ()), columns.get("probability", ()), strict=True):
        if isinstance(label, list):
            yield from zip(label, probability, strict=True)
        elif label is not None:
            yield label, probability


def _ids_of(storage: Storage, plan: Plan, contents: list[bytes]) -> list[list[str]]:
    ids: dict[bytes, list[str]] = {content: [] for content in contents}
    for rows in _batches(storage, plan, ["id", "sha256"]):
        for name, digest in zip(rows.column(0).to_pylist(), rows.column(1).to_pylist(), strict=True):
            same = ids.get(bytes.fromhex(digest)[:16]) if digest else None
            if same is not None:
                same.append(name)
    return [*ids.values()]


def page_of(report: BulkReport, plan: Plan, *, name: str) -> str:
    """Return the page as HTML text.  The same job gives the same text.  name: the name of the bundle."""
    errors = sorted(report.errors.items(), key=lambda item: (-item[1][0], item[0]))
    return rendered(
        "bulk/page.html",
        title=f"{counted(report.images, 'image')} classified by {name}",
        summary=_summary(report, plan),
        shown=_SHOWN,
        classes=[
            (label, f"{count:,}", f"{count / report.images:.1%}", f"{total / count:.3f}")
            for label, (count, total) in report.classes.items()
        ],
        confidence=_confidence(report),
        duplicates=[
            (ids[0], f"{len(ids):,}", ", ".join(ids[1:4]) + (", …" if len(ids) > 4 else ""))
            for ids in report.most_repeated
        ],
        errors=[(error, f"{count:,}", first) for error, (count, first) in errors[:_SHOWN]],
        scope=_scope(plan),
    )


def _summary(report: BulkReport, plan: Plan) -> Summary:
    changes = []
    if report.broken:
        changes.append(f"{counted(report.broken, 'broken image')} without an answer; section Errors lists the reasons.")
    if report.duplicates:
        changes.append(f"{counted(report.duplicates, 'image')} with the content of another image.")
    if plan.left_out:
        changes.append(f"{left_out_text(plan.left_out)}.")
    changes.append("Images that were added after the start of the job are not part of this report.")
    few = report.broken <= _FEW_BROKEN * report.images
    return Summary(
        outcome="passed" if not report.broken else "undecided" if few else "failed",
        word=counted(report.broken, "broken image").upper() if report.broken else "COMPLETE",
        sentence=f"The network answered {report.images - report.broken:,} of {counted(report.images, 'image')}.",
        changes=tuple(changes),
    )


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
        "source": f"{counted(plan.files, 'file')} of kind {plan.kind}",
        "SHA-256 of the list of files": plan.listing_sha256,
        "runner": settings.runner,
        "batch": str(settings.batch),
        "shards": f"{len(plan.shards):,}, each of at most {counted(settings.shard_images, 'image')}",
        **{f"version of {package}": number for package, number in settings.versions.items()},
    }
