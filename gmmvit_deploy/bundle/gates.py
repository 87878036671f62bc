"""State what a graph or a program must reach on images, compared with float32."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.arguments import Refusals, require_number
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.intervals import Z95_ONE_SIDED, score_interval, share_interval
from gmmvit_deploy.neighbours import MIN_IMAGES, kept_neighbours
from gmmvit_deploy.tolerances import signal_to_noise_db

if TYPE_CHECKING:
    from numpy.typing import NDArray


def kept_beside(accuracy: float) -> float:
    """Return the share of decisions that a network must keep beside a gate of its accuracy.

    Decisions that become right hide others that become wrong. So many may change that the accuracy could fall by three
    times what the gate allows: 0.97 beside 0.99, as the gates that `gmmvit optimize` has without labels and with them.
    """
    return max(0.0, 1 - 3 * (1 - accuracy))


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """What a graph (``gmmvit convert``) or a program (``gmmvit optimize``) must reach; None does not judge a measure.

    keep_decisions: the share of the images that keep their decision, which the interval of the share must reach, as in
    the check ``decisions`` of ``gmmvit parity``.
    snr_db: the signal-to-noise ratio of the logits (`tolerances.signal_to_noise_db`), in dB.
    accuracy: the share of float32's top-1 to reach: the paired interval of the difference must lie at or above
    (accuracy − 1) · top-1, as in the check ``accuracy`` of ``gmmvit parity``. The interval of the decisions that keep
    must reach `kept_beside`.
    keep_neighbours: the share of nearest neighbours that features keep (`neighbours`), which the interval of the share
    must reach; for networks without logits, as in the check ``neighbours`` of ``gmmvit parity``.
    Errors: InputError for a value that nothing can miss, or that no number of images can show.
    """

    keep_decisions: float | None = None
    snr_db: float | None = None
    accuracy: float | None = None
    keep_neighbours: float | None = None

    def __post_init__(self) -> None:
        refusals = Refusals()
        for name in ("keep_decisions", "accuracy", "keep_neighbours"):
            share = getattr(self, name)
            with refusals.collected():
                require_number(name, share, "a share below 1, such as 0.98", lambda value: 0 < value < 1)
        with refusals.collected():
            require_number(
                "snr_db", self.snr_db, "a positive number of dB, such as 25", lambda value: 0 < value < math.inf
            )
        refusals.raise_all()

    @property
    def kind(self) -> str:
        """What `min_share` is a share of, in words."""
        if self.keep_neighbours is not None:
            return "kept neighbours"
        return "kept decisions" if self.accuracy is None else "accuracy ratio"

    @property
    def min_share(self) -> float:
        """The smallest share that passes a gate on decisions, accuracy or neighbours; 0 if it has none of them."""
        return self.accuracy or self.keep_decisions or self.keep_neighbours or 0.0

    def require_images(self, count: int, top1: float | None) -> None:
        """Refuse too few images: those that could not pass the gate even if int8 changed none of their decisions.

        count: the number of images.  top1: of the float32 graph on them; None if they have no labels.
        Errors: InputError.
        """
        z2 = Z95_ONE_SIDED**2
        needed = {}
        for option, share in (("decisions", self.keep_decisions), ("neighbours", self.keep_neighbours)):
            if share is not None:
                least = MIN_IMAGES if option == "neighbours" else 0
                needed[f"--keep-{option} {share:g}"] = max(z2 * share / (1 - share), least)
        if self.accuracy is not None:
            if top1 is None:
                raise InputError(
                    "--accuracy needs calibration images with the index of their class, and these have no labels",
                    hint="type --calibration array:FILE.npz or --calibration folder:PATH with a folder for each class, "
                    "or --keep-decisions in place of --accuracy",
                )
            lost = (1 - self.accuracy) * max(top1, 1 / max(count, 1))
            needed[f"--accuracy {self.accuracy:g}"] = z2 * (1 - lost) / lost
        for option, images in needed.items():
            if count < images:
                raise InputError(
                    f"{option} cannot be shown on {count} images: it needs {math.ceil(images)}, even if nothing "
                    "changes; one half of the calibration images is judged, the other sets the ranges",
                    hint=f"give at least {2 * math.ceil(images)} images, and --calibration-images "
                    f"{2 * math.ceil(images)}; or type --snr-db, which fewer images can show",
                )

    def row(
        self,
        logits: NDArray[Any],
        reference: NDArray[Any],
        labels: NDArray[Any] | None,
        thresholds: NDArray[Any] | None,
    ) -> dict[str, Any]:
        """Measure logits (B, C) against the float32 graph's.

        labels: (B,), the true classes, or None.  thresholds: (C,), of a multi-label network's logits, or None.
        Returns ``db``, ``kept`` with ``kept_interval``, and ``holds``, True if the gate holds; for the gate accuracy
        also ``accuracy``, ``float32_accuracy`` and ``accuracy_interval``, of their difference.
        """
        count = len(reference)
        if thresholds is None:
            same = logits.argmax(1) == reference.argmax(1)
        else:
            same = ((logits >= thresholds) == (reference >= thresholds)).all(1)
        row: dict[str, Any] = {
            "db": signal_to_noise_db(logits, reference, over_images=thresholds is not None),
            "kept": float(same.mean()),
            "kept_interval": list(share_interval(int(same.sum()), count)),
        }
        holds = self.snr_db is None or row["db"] >= self.snr_db
        if self.keep_decisions is not None:
            holds &= row["kept_interval"][0] >= self.keep_decisions
        if self.accuracy is not None and labels is not None:
            right, before = _right(logits, labels), _right(reference, labels)
            interval = score_interval(count, int((before & ~right).sum()), int((right & ~before).sum()))
            row |= {
                "accuracy": float(right.mean()),
                "float32_accuracy": float(before.mean()),
                "accuracy_interval": list(interval),
            }
            holds &= interval[0] >= (self.accuracy - 1) * before.mean()
            holds &= row["kept_interval"][0] >= kept_beside(self.accuracy)
        return {**row, "holds": bool(holds)}

    def row_of_features(self, features: NDArray[Any], reference: NDArray[Any]) -> dict[str, Any]:
        """Measure features (B, D), of a network without logits, against the float32 graph's.

        Returns ``db``, ``holds``, and of images that can judge it ``neighbours``, the kept share, with
        ``neighbours_interval``. A gate on neighbours does not hold on other images.
        """
        import numpy as np

        row: dict[str, Any] = {"db": signal_to_noise_db(features, reference)}
        holds = bool(np.isfinite(features).all()) and (self.snr_db is None or row["db"] >= self.snr_db)
        try:
            kept = kept_neighbours(features, reference)
        except ValueError:
            return {**row, "holds": bool(holds and self.keep_neighbours is None)}
        row |= {"neighbours": kept.value, "neighbours_interval": [kept.low, kept.high]}
        holds &= self.keep_neighbours is None or kept.low >= self.keep_neighbours
        return {**row, "holds": bool(holds)}


def _right(logits: NDArray[Any], labels: NDArray[Any]) -> NDArray[Any]:
    right: NDArray[Any] = logits.argmax(1) == labels
    return right
