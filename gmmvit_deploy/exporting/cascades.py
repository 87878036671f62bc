"""Choose the threshold of a cascade with images that set no range (`bundle.cascades`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gmmvit_deploy.bundle.artifacts import Bundle, tool_versions
from gmmvit_deploy.bundle.cascades import CascadeRecord, chosen_threshold, same_margins
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.exporting._recipes import images_of_ranges
from gmmvit_deploy.inference.cascade import decision_margins
from gmmvit_deploy.progress import OnProgress, Progress, ignore
from gmmvit_deploy.runtimes.programs.image_batches import image_hashes, open_images
from gmmvit_deploy.runtimes.runners.cascade import label_thresholds, require_decisions

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gmmvit_deploy.runtimes.runners.runner import Runner

THRESHOLD_IMAGES = 2048
"""The maximum number of images to read. Without up to 384 that set ranges, enough to prove 99.8 %: 1,497."""
_MIN_IMAGES = 32


def cascade_from_images(
    bundle: Bundle,
    fast: Runner,
    exact: Runner,
    source: str,
    *,
    keep_decisions: float,
    known: dict[str, NDArray[Any]] | None = None,
    on_progress: OnProgress = ignore,
) -> CascadeRecord:
    """Choose the images that ``exact``, in float32, computes again.

    source: the calibration images. Those that set ranges of the graph of ``fast`` are left out, and those that chose
    its recipe too if there are as many others.
    known: hash of an image → its logits of ``exact``; what is missing is added, for the next cascade of ``exact``.
    Errors: InputError when the bundle decides nothing, when fewer than `_MIN_IMAGES` images are left, or when a logit
    is not finite; every error of `open_images` and of the runners.
    """
    require_decisions(bundle)
    thresholds, record = label_thresholds(bundle), fast.graph.record if fast.graph is not None else None
    calibration = (record.calibration if record is not None else None) or {}
    ranged, calibrated = set(images_of_ranges(calibration)), set(calibration.get("image_sha256", ()))
    rows: list[tuple[Any, Any, Any]] = []  # margins, losses and hashes
    known = {} if known is None else known
    images = open_images(bundle, source, limit=THRESHOLD_IMAGES, batch=min(32, bundle.manifest.max_batch))
    done = 0
    for batch in images:
        on_progress(Progress(f"choose which images of {fast.label} float32 computes again", done, images.count))
        done += len(batch)
        hashes = np.array(image_hashes(batch))
        new = np.array([digest not in ranged for digest in hashes])
        if new.any():
            missing = np.array([digest not in known for digest in hashes]) & new
            if missing.any():
                known |= dict(zip(hashes[missing], exact.rows(batch[missing]), strict=True))
            logits, reference = fast.rows(batch[new]), np.stack([known[digest] for digest in hashes[new]])
            margins = decision_margins(logits, thresholds)
            rows.append((margins, margins - same_margins(logits, reference, thresholds), hashes[new]))
    if (count := sum(len(margins) for margins, _, _ in rows)) < _MIN_IMAGES:
        raise InputError(f"{count} images of {source} set no range, and a threshold needs {_MIN_IMAGES}")
    margins, losses, hashes = map(np.concatenate, zip(*rows, strict=True))
    margins, losses = margins.astype(np.float64), losses.astype(np.float64)  # as the record gives them back
    fresh = np.array([digest not in calibrated for digest in hashes])
    taken = fresh if 2 * fresh.sum() >= len(fresh) else np.ones(len(fresh), bool)
    margins, losses, hashes = margins[taken], losses[taken], hashes[taken]
    if not (np.isfinite(margins).all() and np.isfinite(losses).all()):
        raise InputError(f"{bundle.path}: logits of {fast.label} are not finite for images of {source}")
    return CascadeRecord(
        runner=fast.label,
        bundle_sha256=bundle.sha256,
        graph_sha256=fast.graph.sha256 if fast.graph is not None else "",
        keep_decisions=keep_decisions,
        threshold=chosen_threshold(margins, losses, keep_decisions),
        margins=_numbers(margins),
        losses=_numbers(losses),
        image_sha256=tuple(map(str, hashes)),
        source=images.source,
        chose_graph=int((~fresh[taken]).sum()),
        golden_margins=_numbers(decision_margins(fast.rows(bundle.golden_rows()[0]), thresholds)),
        versions=tool_versions("openvino"),
    )


def _numbers(values: NDArray[Any]) -> tuple[float, ...]:
    return tuple(map(float, values))
