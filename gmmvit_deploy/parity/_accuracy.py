"""Compare a runner's accuracy with PyTorch's accuracy, and judge the confidence interval of the difference.

gate g      the share of PyTorch's accuracy that the runner must reach, in top-1 and, with more than five classes, in
            top-5; as in MLPerf, 0.999 for fp32, fp16 and bf16, and 0.99 for int8 and fp8
difference  the runner's accuracy − PyTorch's accuracy
bound       (g − 1) · PyTorch's accuracy: the lowest difference that passes
passed      the whole interval of the difference lies at or above the bound
failed      the whole interval of the difference lies below the bound
undecided   the interval of the difference contains the bound: too few images to decide, unless no image can become
            right or wrong (`parity._paired`); or PyTorch itself is not clearly right more often than by chance, so the
            labels show nothing (`wrong_labels`)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import compress
from typing import Any

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.images.data.images import Images
from gmmvit_deploy.inference.precision import SPECS
from gmmvit_deploy.models.specs import ModelSpec
from gmmvit_deploy.parity._multi_label import MultiLabelAccuracy
from gmmvit_deploy.parity._numeric import NumericCheck
from gmmvit_deploy.parity._runner_check import NO_LOGITS, Answers, RunnerCheck, RunnerUnderTest
from gmmvit_deploy.parity._single_label import Accuracy, classes_of
from gmmvit_deploy.parity._verdict import Check, worst_of


def accuracy_of(bundle: Bundle, data: Images | None) -> Accuracy | MultiLabelAccuracy | None:
    """Return what counts right logits of a bundle on the data; None without data or without logits.

    Errors: InputError when the data has other classes than the bundle.
    """
    manifest = bundle.manifest
    if data is None or not manifest.has_logits:
        return None
    classes = classes_of(data.classes, manifest.labels, data.name)
    if manifest.task == "multi-label":
        return MultiLabelAccuracy(manifest.label_set, classes)
    return Accuracy(manifest.labels, classes)


class AccuracyCheck(RunnerCheck):
    name = "accuracy"
    of_gate = True

    def __init__(self, tested: RunnerUnderTest) -> None:
        super().__init__(tested)
        data = None if self.run.reference is None else self.run.options.images
        counted = {batch: accuracy_of(self.bundle, data) for batch in tested.batches}
        self._at = {batch: accuracy for batch, accuracy in counted.items() if accuracy is not None}
        self._left_out = 0  # labelled images that calibrated the graph

    @property
    def must_decide(self) -> bool:
        return self.run.options.gate is not None

    def add(self, answers: Answers) -> None:
        if not answers.real or answers.batch not in self._at:
            return
        new, labels = answers.new, answers.known.batch.labels
        judged = list(compress(labels, new))
        self._at[answers.batch].add(judged, answers.known.trained[new], answers.comparable[new])
        if answers.batch == self.tested.batches[0]:
            self._left_out += sum(label is not None for label in compress(labels, ~new))

    def judge(self) -> Check:
        return self.run.trained.judged(self._judged())

    def _judged(self) -> Check:
        if self.run.reference is None:
            return self.not_judged(self.run.why_no_images)
        if not self.bundle.manifest.has_logits:
            return self.not_judged(NO_LOGITS)
        check = self.not_judged("no labelled images were given; add --data")
        if self._at:
            gate = self.run.options.gate or SPECS[self.runner.precision].accuracy_gate
            within = self.graph is None and self.tested.check(NumericCheck).within_limits
            checks = {batch: accuracy.check(gate, within_limit=within) for batch, accuracy in self._at.items()}
            check = worst_of(checks, lambda details: lower_ratio(details)[0])
            if check.details:
                nearest = max(each.details["nearest_to_changing"] for each in checks.values())
                check = replace(check, details={**check.details, "nearest_to_changing": nearest})
            check = _without_calibration_images(check, self._left_out)
        return _of_resized(check, self.bundle.manifest.spec)


def lower_ratio(details: Mapping[str, Any]) -> tuple[float, Mapping[str, Any]]:
    """Return (the runner's accuracy divided by PyTorch's, its numbers), of top-1, or of top-5 if that is lower.

    For several labels, of the images with all labels right.  The ratio is NaN if PyTorch is right on no image.
    """
    both = filter(None, (details.get("top1") or details.get("all_right"), details.get("top5")))
    ratios = [(share["runner"] / share["pytorch"] if share["pytorch"] else math.nan, share) for share in both]
    return min(ratios, key=lambda each: each[0])


def _without_calibration_images(accuracy: Check, count: int) -> Check:
    """Return the accuracy check without ``count`` images that calibrated the graph, which fits them better."""
    if not count:
        return accuracy
    if accuracy.verdict == "skipped":
        why = (
            f"the graph was calibrated on all {count:,} labelled images, so they cannot judge it; add others to --data"
        )
        return replace(accuracy, verdict="undecided", summary=why, reasons=(why,))
    note = f"{count:,} more were left out, because the graph was calibrated on them"
    return replace(accuracy, summary=f"{accuracy.summary}; {note}")


def _of_resized(accuracy: Check, spec: ModelSpec) -> Check:
    if not spec.resizing:
        return accuracy
    # PyTorch runs a resized model too, so every check can pass although it predicts wrong classes.
    if accuracy.verdict != "skipped":
        note = f"the model was {spec.resizing}: compare PyTorch's top-1 with the top-1 before the resizing"
        return replace(accuracy, summary=f"{accuracy.summary}; {note}")
    why = f"the model was {spec.resizing}, and its accuracy at this size was not checked: {accuracy.summary}"
    return replace(accuracy, verdict="undecided", summary=why, reasons=(why,))
