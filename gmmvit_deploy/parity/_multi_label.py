"""Compare the accuracy of a multi-label runner with PyTorch's: mean average precision, F1, and images all right.

    mAP       mean over the classes of the average precision; a class that no image has, or that every image has, is
              left out
    F1        with the threshold of each class; macro: the mean over the classes, micro: over all labels of all images
    all right share of the images whose labels are all right

mAP and F1 are scikit-learn's. As for top-1, the interval of the difference of ``all right`` is compared with the gate
(`parity._accuracy`), unless no logit is near enough to its threshold to cross it (`parity._paired`). The runner's mAP
and macro F1 must also reach the gate, a share of PyTorch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.extras import require
from gmmvit_deploy.images.data.images import Label
from gmmvit_deploy.inference.labels import LabelSet
from gmmvit_deploy.parity._paired import Paired, nearest_to_changing
from gmmvit_deploy.parity._single_label import Classes
from gmmvit_deploy.parity._verdict import Check, skipped_check
from gmmvit_deploy.wrong_labels import chance_of, unrelated_labels

MEASURES = {"map": "mAP", "f1_macro": "macro F1", "f1_micro": "micro F1"}
"""Measure in the details of the check → its name."""


class MultiLabelAccuracy:
    """Collect labels and logits of PyTorch and of a runner.  The methods are those of `Accuracy`."""

    def __init__(self, label_set: LabelSet, classes: Classes) -> None:
        """Errors: MissingDependencyError when scikit-learn is not installed."""
        self._metrics = require("sklearn.metrics", package="scikit-learn", extra="metrics")
        self._label_set, self._classes = label_set, classes
        self._true: list[NDArray[Any]] = []
        self._trained: list[NDArray[Any]] = []
        self._logits: list[NDArray[Any]] = []
        self._unlabelled = 0

    def add(self, labels: Sequence[Label], trained: NDArray[Any], logits: NDArray[Any]) -> None:
        """Add the class indices of images, or None, and logits (B, C); those that are not finite count as −∞.

        Errors: InputError when an image has a single class instead of a set of labels, or a label that is no class.
        """
        known, true = self._true_sets(labels, trained.shape[1])
        self._unlabelled += int((~known).sum())
        self._true.append(true)
        self._trained.append(trained[known])
        self._logits.append(np.where(np.isfinite(logits[known]), logits[known], -np.inf))

    def right(self, labels: Sequence[Label], logits: NDArray[Any]) -> list[bool | None]:
        """Return for each image whether the logits (B, C) give all labels right; None if unlabelled."""
        known, true = self._true_sets(labels, logits.shape[1])
        answers = iter(self._all_right(true, logits[known]).tolist())
        return [next(answers) if labelled else None for labelled in known]

    def _all_right(self, true: NDArray[Any], logits: NDArray[Any]) -> NDArray[Any]:
        right: NDArray[Any] = ((logits >= np.array(self._label_set.threshold_logits)) == true).all(1)
        return right

    def _true_sets(self, labels: Sequence[Label], classes: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return (which images have labels, for each of these images which classes it has)."""
        known = np.array([label is not None for label in labels], bool)
        true = np.zeros((int(known.sum()), classes), bool)
        for row, label in enumerate(label for label in labels if label is not None):
            if isinstance(label, int):
                raise InputError(
                    "the data has a single class for each image, and the bundle is multi-label",
                    hint="type --data table:FILE.csv with a column for each label, or an .npz file whose array labels "
                    "is (N, classes) of 0 and 1",
                )
            if label and max(label) >= (len(self._classes.to_logit) if self._classes.to_logit else classes):
                raise InputError(f"labels of the data: expected {classes} classes, got the index {max(label)}")
            true[row, [self._classes.to_logit[index] if self._classes.to_logit else index for index in label]] = True
        return known, true

    def check(self, gate: float, *, within_limit: bool = False) -> Check:
        """Judge mAP, F1 and the difference of the share of images whose labels are all right."""
        true = np.concatenate(self._true) if self._true else np.zeros((0, 0), bool)
        if not len(true):
            return skipped_check("accuracy", f"the data has no labels: {self._unlabelled} images without labels")
        thresholds = np.array(self._label_set.threshold_logits)
        scores = {"pytorch": np.concatenate(self._trained), "runner": np.concatenate(self._logits)}
        right = {who: self._all_right(true, logits) for who, logits in scores.items()}
        counts = np.zeros((2, 2), int)
        np.add.at(counts, (right["pytorch"].astype(int), right["runner"].astype(int)), 1)
        pairs = Paired.of(counts)
        measures = {who: self._measures(true, logits, logits >= thresholds) for who, logits in scores.items()}
        low, high = pairs.interval()
        verdict, allowed = pairs.verdict(gate)
        distances, margins = np.abs(scores["runner"] - scores["pytorch"]), np.abs(scores["pytorch"] - thresholds)
        nearest = nearest_to_changing(distances, margins)
        by_margins = within_limit and nearest < 1 and verdict == "undecided"
        if by_margins:
            verdict = "passed"
        reasons = []
        if wrong := _unrelated(true, scores["pytorch"] >= thresholds):
            verdict = "failed" if verdict == "failed" else "undecided"
            reasons.append(f"{wrong}; --keep-decisions needs no labels")
        elif verdict != "passed":
            reasons.append(
                f"of {pairs.images:,} images, only PyTorch has all labels right on {pairs.lost} and only the runner on "
                f"{pairs.gained}; the interval of the difference is {low:+.2%} to {high:+.2%}, the gate {allowed:+.3%}"
            )
        for name in ("map", "f1_macro"):
            ours, theirs = measures["runner"][name], measures["pytorch"][name]
            if ours is not None and theirs is not None and ours < gate * theirs:
                verdict = "failed"
                reasons.append(f"{MEASURES[name]} {ours:.4f}, expected at least {gate:g} times PyTorch's {theirs:.4f}")
        shown = ", ".join(
            f"{MEASURES[name]} {measures['runner'][name]:.4f} (PyTorch {measures['pytorch'][name]:.4f})"
            for name in MEASURES
            if measures["runner"][name] is not None
        )
        return Check(
            name="accuracy",
            verdict=verdict,
            summary=f"{shown}; all labels right {pairs.runner_accuracy:.2%} (PyTorch {pairs.pytorch_accuracy:.2%}), "
            f"on {pairs.images:,} images{'; no label is near enough to its threshold to change' if by_margins else ''}",
            reasons=tuple(reasons),
            details={
                "images": pairs.images,
                "unlabelled": self._unlabelled,
                "gate": gate,
                "lowest_difference_allowed": allowed,
                "all_right": pairs.numbers(),
                "measures": measures,
                "images_needed": pairs.images_needed(allowed) if verdict == "undecided" and not wrong else None,
                "nearest_to_changing": nearest,
                "by_margins": by_margins and verdict == "passed",
                "classes": self._classes.note,
                "wrong_labels": wrong,
            },
        )

    def _measures(self, true: NDArray[Any], logits: NDArray[Any], present: NDArray[Any]) -> dict[str, float | None]:
        mixed = true.any(0) & ~true.all(0)
        scores = np.nan_to_num(logits, neginf=float(np.finfo(np.float32).min))
        precision = self._metrics.average_precision_score
        f1 = self._metrics.f1_score
        return {
            "map": float(precision(true[:, mixed], scores[:, mixed], average="macro")) if mixed.any() else None,
            "f1_macro": float(f1(true, present, average="macro", zero_division=0.0)),
            "f1_micro": float(f1(true, present, average="micro", zero_division=0.0)),
        }


def _unrelated(true: NDArray[Any], answers: NDArray[Any]) -> str:
    """Return why the labels (N, C) cannot judge, from PyTorch's answers (N, C), or ""."""
    _, sets = np.unique(np.concatenate([true, answers]), axis=0, return_inverse=True)
    counts = [np.bincount(part, minlength=sets.max() + 1) for part in np.split(sets.reshape(-1), 2)]
    return unrelated_labels(int((true == answers).all(1).sum()), len(true), chance_of(*counts))
