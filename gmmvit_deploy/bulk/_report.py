"""The report on a complete job: classes, confidence, errors, duplicates, and unusual images.

An image is unusual if its answer is far from the answers of all reference images: the golden images of the bundle, and
calibration images if the user names some.

    answer    the features; without features, the logits minus their mean, because softmax ignores a common shift
    distance  ‖a/‖a‖ − r/‖r‖‖ to the nearest reference r, between 0 and 2
    limit     the largest such distance of a calibration image to the nearest other reference; without calibration
              images, of a golden image

Source: Sun et al., "Out-of-Distribution Detection with Deep Nearest Neighbors", arXiv 2204.06507, with k = 1.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.bulk._plan import Plan
from gmmvit_deploy.bulk._shard import opened_shard
from gmmvit_deploy.bulk._storage import Storage
from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.counts import counted
from gmmvit_deploy.images.data.files import left_out_text
from gmmvit_deploy.reports.pages import Summary, rendered

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gmmvit_deploy.runtimes.programs.image_batches import ImageBatches
    from gmmvit_deploy.runtimes.runners.runner import Runner

_SHOWN = 20
"""The number of classes, duplicates, errors and unusual images that the report shows."""
_BINS = 10
_MAX_ERRORS = 1000
"""Distinct errors that are counted apart: messages of decoders can contain numbers."""
_FEW_BROKEN = 0.01
"""The maximum share of broken images with which the verdict is not a failure."""
_ROWS_AT_ONCE = 4096
_FEW_CALIBRATION = 50
"""With fewer calibration images, the distance between references says little about real images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The images that others are compared with.

    answers: unit vectors (R, D).  output: what the vectors were made from.  limit: as at the top of this file.
    golden, calibration: the number of images of each kind.
    """

    answers: NDArray[Any]
    output: str
    limit: float
    golden: int
    calibration: int


@dataclass(slots=True, kw_only=True)
class BulkReport:
    """Numbers of a job.

    classes: label → (images, sum of their probabilities).  confidence: images in each tenth of the probability.
    errors: message → (images, id of the first).  duplicates: images whose content occurred before.
    most_repeated: ids of the images of a content, for the contents that occur most often.
    unusual: images beyond the limit.  most_unusual: (distance, id, label), the largest distance first.
    """

    images: int = 0
    broken: int = 0
    classes: dict[str, tuple[int, float]] = field(default_factory=dict)
    confidence: list[int] = field(default_factory=lambda: [0] * _BINS)
    errors: dict[str, tuple[int, str]] = field(default_factory=dict)
    duplicates: int = 0
    most_repeated: list[list[str]] = field(default_factory=list)
    unusual: int = 0
    most_unusual: list[tuple[float, str, str]] = field(default_factory=list)
    reference: Reference | None = None


def reference_of(bundle: Bundle, runner: Runner, calibration: ImageBatches | None) -> Reference:
    """Compute the answers of the reference images.  Errors: InputError when a calibration image cannot be decoded."""
    import numpy as np

    golden = bundle.golden_set()
    output = bundle.manifest.output_names[-1]  # the features, if there are features
    stored = (golden.logits, golden.image_logits)
    if golden.features is not None and golden.image_features is not None:
        stored = (golden.features, golden.image_features)
    answers = [part for part in stored if len(part)]
    count = 0
    for batch in calibration or ():
        answers.append(runner.rows_all(batch)[output])
        count += len(batch)
    vectors = _unit(np.concatenate(answers), output)
    apart = _distances(vectors, vectors)
    np.fill_diagonal(apart, np.inf)
    golden_count = len(vectors) - count
    # Golden images are far from each other by design, and would allow everything beside real images.
    judged = apart[golden_count:] if count else apart
    return Reference(
        answers=vectors, output=output, limit=float(judged.min(1).max()), golden=golden_count, calibration=count
    )


def _unit(answers: NDArray[Any], output: str) -> NDArray[Any]:
    import numpy as np

    exact = answers.astype(np.float64)
    if output == "logits":
        exact = exact - exact.mean(-1, keepdims=True)
    unit: NDArray[Any] = exact / np.maximum(np.linalg.norm(exact, axis=-1, keepdims=True), 1e-30)
    return unit


def _distances(some: NDArray[Any], others: NDArray[Any]) -> NDArray[Any]:
    import numpy as np

    distances: NDArray[Any] = np.sqrt(np.maximum(2 - 2 * some @ others.T, 0))
    return distances


def report_of(storage: Storage, plan: Plan, reference: Reference) -> BulkReport:
    """Read all shards of a complete job, a few rows at a time.

    In memory stay 16 bytes for each image, with which equal contents are found.
    Errors: InputError when a shard is damaged.
    """
    import numpy as np

    report = BulkReport(reference=reference)
    counts: Counter[str] = Counter()
    sums: defaultdict[str, float] = defaultdict(float)
    hashes = []
    for rows in _batches(storage, plan, None):
        report.images += rows.num_rows
        columns = rows.to_pydict()
        hashes += [bytes.fromhex(digest)[:16] for digest in columns["sha256"] if digest]
        _count_errors(report, columns["id"], columns["error"])
        for label, probability in _decisions(columns):
            counts[label] += 1
            sums[label] += probability
            report.confidence[min(int(probability * _BINS), _BINS - 1)] += 1
        _compare(report, reference, columns)
    report.classes = {label: (count, sums[label]) for label, count in counts.most_common()}
    report.most_unusual.sort(key=lambda row: (-row[0], row[1]))
    content, occurrences = np.unique(np.array(hashes, "V16"), return_counts=True)
    report.duplicates = int((occurrences - 1).sum())
    often = np.argsort(-occurrences, kind="stable")[:_SHOWN]
    repeated = [content[index].tobytes() for index in often if occurrences[index] > 1]
    if repeated:
        report.most_repeated = _ids_of(storage, plan, repeated)
    return report


def _batches(storage: Storage, plan: Plan, columns: list[str] | None) -> Iterator[Any]:
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


def _compare(report: BulkReport, reference: Reference, columns: dict[str, list[Any]]) -> None:
    import numpy as np

    usable = [row for row, error in enumerate(columns["error"]) if error is None]
    if not usable:
        return
    answers = np.array([columns[reference.output][row] for row in usable], np.float64)
    nearest = _distances(_unit(answers, reference.output), reference.answers).min(1)
    report.unusual += int((nearest > reference.limit).sum())
    labels = columns.get("label")
    rows = []
    for place in np.argsort(-nearest, kind="stable")[:_SHOWN]:
        row = usable[place]
        label = labels[row] if labels else ""
        rows.append((float(nearest[place]), columns["id"][row], ", ".join(label) if isinstance(label, list) else label))
    report.most_unusual = heapq.nlargest(_SHOWN, report.most_unusual + rows, key=lambda row: row[0])


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
    reference = report.reference
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
        errors=[(error, f"{count:,}", first) for error, (count, first) in errors[:_SHOWN]],
        scope=_scope(plan),
    )


def _summary(report: BulkReport, plan: Plan) -> Summary:
    changes = []
    if report.broken:
        changes.append(f"{counted(report.broken, 'broken image')} without an answer; section Errors lists the reasons.")
    if report.unusual:
        changes.append(
            f"{counted(report.unusual, 'image')} with answers unlike those of all images to compare with: "
            "a label may be wrong there, whatever its probability is."
        )
    if report.duplicates:
        changes.append(f"{counted(report.duplicates, 'image')} with the content of another image.")
    reference = report.reference
    if reference and reference.calibration < _FEW_CALIBRATION:
        changes.append(
            f"Unusual images were found by comparison with {reference.golden} reference images of the bundle, "
            f"which are generated, and {counted(reference.calibration, 'calibration image')}; name images like the "
            "expected images with --calibration."
        )
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
