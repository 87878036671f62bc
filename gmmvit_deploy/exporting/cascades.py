"""Choose the thresholds of cascades with images that set no range (`bundle.cascades`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from gmmvit_deploy.bundle.artifacts import Bundle, tool_versions
from gmmvit_deploy.bundle.cascades import CascadeRecord, chosen_threshold, same_margins, write_cascade
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.exporting._recipes import images_of_ranges
from gmmvit_deploy.inference.cascade import decision_margins
from gmmvit_deploy.progress import OnProgress, Progress, ignore
from gmmvit_deploy.runtimes.programs.image_batches import image_hashes, open_images
from gmmvit_deploy.runtimes.runners.cascade import label_thresholds, why_no_cascade

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gmmvit_deploy.inference.runner_name import RunnerName
    from gmmvit_deploy.runtimes.runners.runner import Runner

THRESHOLD_IMAGES = 1536
"""The maximum number of images that choose a threshold: enough to prove 99.8 % if no decision changes."""
_MIN_IMAGES = 32


@dataclass(slots=True, kw_only=True)
class _Fast:
    """A fast runner, and what it gave.  ranged: the hashes of the images that set ranges of its graph."""

    runner: Runner
    ranged: frozenset[str]
    margins: list[NDArray[Any]] = field(default_factory=list)
    losses: list[NDArray[Any]] = field(default_factory=list)


def write_cascades(
    bundle: Bundle,
    fast: Mapping[RunnerName, Runner],
    exact: Runner,
    source: str,
    *,
    keep_decisions: float,
    on_progress: OnProgress = ignore,
) -> dict[RunnerName, str]:
    """Write the records of the cascades of several fast runners, and return why others have none.

    fast: name, with its form → the runner, one for each graph.  exact: a float32 runner.
    source: the calibration images; those that set ranges of a graph do not choose its threshold.
    Errors: every error of `open_images` and of the runners.  OutputError when a record cannot be written.
    """
    if why := why_no_cascade(bundle):
        return dict.fromkeys(fast, why)
    thresholds = label_thresholds(bundle)
    tested = {name: _Fast(runner=runner, ranged=_ranged(runner)) for name, runner in fast.items()}
    images = open_images(bundle, source, limit=THRESHOLD_IMAGES, batch=min(32, bundle.manifest.max_batch))
    done = 0
    for batch in images:
        on_progress(Progress("choose which images float32 computes again", done, images.count))
        done += len(batch)
        reference, hashes = exact.rows(batch), image_hashes(batch)
        for each in tested.values():
            new = np.array([digest not in each.ranged for digest in hashes])
            if new.any():
                logits = each.runner.rows(batch[new])
                margins = decision_margins(logits, thresholds)
                each.margins.append(margins)
                each.losses.append(margins - same_margins(logits, reference[new], thresholds))
    why_not: dict[RunnerName, str] = {}
    for name, each in tested.items():
        count = sum(map(len, each.margins))
        if count < _MIN_IMAGES:
            why_not[name] = f"{count} images of {source} set no range, and a threshold needs {_MIN_IMAGES}"
            continue
        write_cascade(bundle, name, _record(bundle, name, each, images.source, images.sha256, keep_decisions))
    return why_not


def _record(
    bundle: Bundle, name: RunnerName, each: _Fast, source: str, sha256: str, keep_decisions: float
) -> CascadeRecord:
    runner, thresholds = each.runner, label_thresholds(bundle)
    margins, losses = np.concatenate(each.margins), np.concatenate(each.losses)
    if not (np.isfinite(margins).all() and np.isfinite(losses).all()):
        raise InputError(f"{bundle.path}: logits of {name} are not finite for images of {source}")
    golden = decision_margins(runner.rows(bundle.golden_rows()[0]), thresholds)
    return CascadeRecord(
        first=name.arithmetic,
        bundle_sha256=bundle.sha256,
        graph_sha256=runner.graph.sha256 if runner.graph is not None else "",
        keep_decisions=keep_decisions,
        threshold=chosen_threshold(margins, losses, keep_decisions),
        margins=_numbers(margins),
        losses=_numbers(losses),
        source=source,
        sha256=sha256,
        golden_margins=_numbers(golden),
        runner=runner.label,
        versions=tool_versions("openvino"),
    )


def _numbers(values: NDArray[Any]) -> tuple[float, ...]:
    return tuple(map(float, values))


def _ranged(runner: Runner) -> frozenset[str]:
    record = runner.graph.record if runner.graph is not None else None
    return frozenset(images_of_ranges(record.calibration)) if record is not None else frozenset()
