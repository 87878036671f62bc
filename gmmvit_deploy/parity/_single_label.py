"""Count the images that PyTorch and a runner classify correctly, top-1 and top-5, and judge the difference by a gate.

Top-1 is the share of images for which the true class has the largest logit; for top-5, the true class has one of the
five largest logits. With more than five classes, the gate also judges top-5.

Margin of an image, in top-k: |PyTorch's logit of the true class − the k-th largest of its other logits|. Two logits
change places only if it is at most twice the largest difference of the runner's logits of this image from PyTorch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.images.data.images import Label
from gmmvit_deploy.images.names import shown_names
from gmmvit_deploy.inference.labels import distinct_names
from gmmvit_deploy.intervals import mcnemar
from gmmvit_deploy.parity._paired import Paired, nearest_to_changing
from gmmvit_deploy.parity._verdict import SEVERITY, Check, Verdict, skipped_check
from gmmvit_deploy.wrong_labels import permuted_labels, wrong_labels

_TOP = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Classes:
    """How the data's classes match the bundle's.

    to_logit: the index of the logit for each class of the data; None if it is that of the class.
    note: a sentence about how the classes were matched; empty if they are the same.
    """

    to_logit: tuple[int, ...] | None
    note: str


def classes_of(data: Sequence[str], labels: Sequence[str], source: str) -> Classes:
    """Match the data's classes with the bundle's labels, by name, or by distinct name, such as ``crane (134)``.

    data: the names of the data's classes; empty if the data names no classes.  source: the name of the data.
    Errors: InputError when the data has classes that the bundle lacks, or a label that several classes of the bundle
    have.
    """
    if not data:
        return Classes(to_logit=None, note="the data names no classes; its labels are used as indices of the logits")
    names = distinct_names(labels)
    if tuple(data) in (tuple(labels), names):
        return Classes(to_logit=None, note="")
    index = {name: number for number, name in enumerate(names)}
    alien = [name for name in data if name not in index]
    if len(data) <= len(labels) and not alien:
        order = "the data lists the classes in another order than the bundle; they were matched by name"
        part = f"the data has {len(data)} of the bundle's {len(labels)} classes"
        note = order if len(data) == len(labels) else part
        return Classes(to_logit=tuple(index[name] for name in data), note=note)
    for name in alien:
        if alike := [f"'{names[number]}'" for number, label in enumerate(labels) if label == name]:
            raise InputError(
                f"{source}: the bundle has {len(alike)} classes with the label {name}, so the label does not tell "
                "which class the images belong to",
                hint=f"name the folder of each class by label and index: {', '.join(alike)}",
            )
    raise InputError(
        f"{source}: expected the bundle's {len(labels)} classes, such as {shown_names(labels[:3])}; "
        f"the data has {len(data)} classes, such as {shown_names(alien[:3] or data[:3])}",
        hint="export the checkpoint again with --labels, the names of this data's classes in the order of training "
        "(ImageFolder sorts them by name), or type --data with other images",
    )


class Accuracy:
    def __init__(self, labels: Sequence[str], classes: Classes) -> None:
        count = len(labels)
        self._labels, self._classes = distinct_names(labels), classes
        self._top1 = np.zeros((count, 2, 2), np.int64)  # axes: true class, PyTorch correct, runner correct
        self._top5 = np.zeros((2, 2), np.int64)
        self._answers = np.zeros((count, count), np.int64)  # axes: true class, class that PyTorch predicts
        self._unlabelled = 0
        self._nearest = 0.0

    def add(self, labels: Sequence[Label], trained: NDArray[Any], logits: NDArray[Any]) -> None:
        """Add the data's class index of images, or None, and logits (B, C); those that are not finite count as −∞.

        Errors: InputError when a label lies outside the model's classes, or when an image has a set of labels.
        """
        known, true = self._true(labels)
        self._unlabelled += int((~known).sum())
        trained, logits = trained[known], np.where(np.isfinite(logits[known]), logits[known], -np.inf)
        np.add.at(self._answers, (true, trained.argmax(1)), 1)
        np.add.at(self._top1, (true, _right(trained, true, 1), _right(logits, true, 1)), 1)
        np.add.at(self._top5, (_right(trained, true, _TOP), _right(logits, true, _TOP)), 1)
        twice = 2 * np.abs(logits - trained.astype(np.float64)).max(1)
        for top in (1, _TOP):
            if trained.shape[1] > top:
                self._nearest = max(self._nearest, nearest_to_changing(twice, _margins(trained, true, top)))

    def right(self, labels: Sequence[Label], logits: NDArray[Any]) -> list[bool | None]:
        """Return for each image whether the logits (B, C) give its class; None if unlabelled.  Errors: as for `add`."""
        known, true = self._true(labels)
        answers = iter(_right(logits[known], true, 1).astype(bool).tolist())
        return [next(answers) if labelled else None for labelled in known]

    def _true(self, labels: Sequence[Label]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return (which images have a label, index of the logit of the true class of each of these images)."""
        known = np.array([label is not None for label in labels], bool)
        if any(isinstance(label, tuple) for label in labels):
            raise InputError(
                "the data has a set of labels for each image, and the bundle is single-label",
                hint="type --data with data that has a class for each image, or export the checkpoint again with "
                "--task multi",
            )
        raw = np.array([label for label in labels if label is not None], np.int64)
        if len(raw) and (raw.min() < 0 or raw.max() >= len(self._labels)):
            raise InputError(
                f"labels of the data: expected class indices 0..{len(self._labels) - 1}, got {raw.min()}..{raw.max()}"
            )
        return known, raw if self._classes.to_logit is None else np.array(self._classes.to_logit)[raw]

    def check(self, gate: float, *, within_limit: bool = False) -> Check:
        """Judge the differences of top-1 and top-5 by the gate; the check has the worse of both verdicts.

        within_limit: True if the runner's logits are within the numeric limit of a precision that is not quantised.
        """
        if not self._top1.sum():
            return skipped_check("accuracy", f"the data has no labels: {self._unlabelled} images without a true class")
        pairs, top5 = Paired.of(self._top1.sum(0)), None
        low, high = pairs.interval()
        verdict, allowed = pairs.verdict(gate)
        needed = pairs.images_needed(allowed)
        summary = (
            f"top-1 {pairs.runner_accuracy:.2%}, PyTorch {pairs.pytorch_accuracy:.2%}; "
            f"difference {pairs.difference:+.2%} ({low:+.2%} to {high:+.2%}), "
            f"gate {allowed:+.3%}, on {pairs.images:,} images"
        )
        reasons = _why(verdict, pairs, allowed, needed)
        if len(self._labels) > _TOP:
            top5 = Paired.of(self._top5)
            low5, high5 = top5.interval()
            verdict5, allowed5 = top5.verdict(gate)
            summary += (
                f"; top-5 {top5.runner_accuracy:.2%}, difference {top5.difference:+.2%} ({low5:+.2%} to {high5:+.2%})"
            )
            if SEVERITY.index(verdict5) > SEVERITY.index(verdict):
                verdict, needed = verdict5, top5.images_needed(allowed5)
                reasons = [f"top-5: {reason}" for reason in _why(verdict5, top5, allowed5, needed)]
        by_margins = within_limit and self._nearest < 1 and verdict == "undecided"
        if by_margins:
            verdict, reasons = "passed", []
            summary += "; no image is near enough to another answer to change"
        if wrong := wrong_labels(self._answers, self._labels):
            permuted = permuted_labels(self._answers, self._labels)
            cause = wrong if permuted else f"{wrong}; --keep-decisions needs no labels"
            reasons = [cause, *(reasons if verdict == "failed" else ())]
            verdict = "failed" if permuted or verdict == "failed" else "undecided"
        return Check(
            name="accuracy",
            verdict=verdict,
            summary=summary,
            reasons=tuple(reasons),
            details={
                "images": pairs.images,
                "unlabelled": self._unlabelled,
                "gate": gate,
                "lowest_difference_allowed": allowed,
                "top1": pairs.numbers(),
                "top5": top5.numbers() if top5 is not None else None,
                "images_needed": needed if verdict == "undecided" and not wrong else None,
                "nearest_to_changing": self._nearest,
                "by_margins": by_margins and verdict == "passed",
                "classes": self._classes.note,
                "wrong_labels": wrong,
                "per_class": [
                    {
                        "class": self._labels[index],
                        "images": int(counts.sum()),
                        "pytorch": int(counts[1].sum()),
                        "runner": int(counts[:, 1].sum()),
                    }
                    for index, counts in enumerate(self._top1)
                    if counts.sum()
                ],
            },
        )


def _right(logits: NDArray[Any], true: NDArray[Any], top: int) -> NDArray[Any]:
    """Return 1 for rows whose true class has one of the ``top`` largest logits; of equal ones, the first is larger."""
    own = logits[np.arange(len(true)), true][:, None]
    classes = np.arange(logits.shape[1])
    before = (logits > own) | ((logits == own) & (classes < true[:, None]))
    right: NDArray[Any] = (before.sum(1) < top) & np.isfinite(own[:, 0])
    return right.astype(int)


def _margins(trained: NDArray[Any], true: NDArray[Any], top: int) -> NDArray[Any]:
    rows, others = np.arange(len(true)), trained.astype(np.float64)
    own = others[rows, true]
    others[rows, true] = -np.inf
    margins: NDArray[Any] = np.abs(own - np.partition(others, -top, axis=1)[:, -top])
    return margins


def _why(verdict: Verdict, pairs: Paired, allowed: float, needed: int | None) -> list[str]:
    changed = f"of {pairs.images:,} images, only PyTorch is right on {pairs.lost} and only the runner on {pairs.gained}"
    if verdict == "failed":
        return [
            f"the loss of accuracy is too large: {changed}; expected a loss of at most {-allowed:.3%} "
            f"(McNemar p = {mcnemar(pairs.lost, pairs.gained):.2g})"
        ]
    if verdict == "undecided":
        more = (
            f"{needed:,} images with the same shares would decide"
            if needed
            else "PyTorch is right on no image, so the labels or the data do not fit the model"
            if pairs.pytorch_accuracy == 0
            else "more images would not help, because the measured difference itself is beyond the gate"
        )
        return [f"too few images to decide: {changed}; {more}"]
    return []
