"""Judge PyTorch's own accuracy on labelled images, and name a preprocessing with which it is clearly higher.

A wrong mean, std, resize rule or order of the channels passes every comparison with PyTorch, because PyTorch gets the
same wrong pixels. Only labels show such a mistake.

    expected    the accuracy that the user expects: failed if the whole interval of PyTorch's accuracy lies below it
    other       if PyTorch's accuracy is below the expected accuracy, or if none is expected: the accuracy with other
                preprocessings, each with a single change that is usual: mean and std, resize rule and crop_pct, or BGR

The other preprocessings are tried on a sample of the labelled images, first on a few images that PyTorch classifies
wrongly. The three that correct most of these, if they correct enough, are tried on the whole sample. A preprocessing is
named if McNemar's exact test on the sample gives p · number of preprocessings < 1 %. Without an expected accuracy, the
finding makes a check undecided that would have passed: the network may have been trained as the bundle states, and
another preprocessing be better all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gmmvit_deploy.errors import ImageError
from gmmvit_deploy.images.data.images import Label, evenly_spaced
from gmmvit_deploy.images.resize_rules import ResizeRule
from gmmvit_deploy.images.spec import ImageSpec
from gmmvit_deploy.intervals import mcnemar, share_interval
from gmmvit_deploy.parity._image_mistakes import CROP_PCTS, bgr, normalisations
from gmmvit_deploy.parity._verdict import Check
from gmmvit_deploy.parity.inputs import ImageStream
from gmmvit_deploy.parity.reference import Reference
from gmmvit_deploy.progress import OnProgress, Progress, ignore
from gmmvit_deploy.wrong_labels import LEVEL

_SAMPLE = 256
_TRIED_FIRST = 16
_SHARE_CORRECTED = 0.25
"""A preprocessing is tried on the whole sample only if it corrects this share of the wrong images tried first; from
80 % to 88 %, it corrects 40 %."""
_MAX_TRIED = 3
_AS_GOOD = 0.02
"""A preprocessing is named beside the best if its accuracy is lower by at most this share of the sample."""
RightOf = Callable[[Sequence[Label], NDArray[Any]], list[bool | None]]
_RULES: tuple[ResizeRule, ...] = ("center-bicubic", "center-bilinear", "stretch-bicubic", "stretch-bilinear")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Preprocessing:
    name: str  # what differs from the bundle, with the options of gmmvit export
    image: ImageSpec
    colours: list[int] | None = None


def other_preprocessings(image: ImageSpec) -> Iterator[_Preprocessing]:
    """Yield preprocessings with a single usual change of the bundle's preprocessing."""
    for name, other in normalisations(image):
        options = " ".join(f"--{key} {','.join(map(str, getattr(other, key)))}" for key in ("mean", "std"))
        yield _Preprocessing(name=f"{name} ({options})", image=other)
    if (colours := bgr(image.channels)) is not None:
        yield _Preprocessing(name="channels in the order BGR", image=image, colours=colours)
    for rule in _RULES:
        for crop_pct in (1.0,) if rule.startswith("stretch") else CROP_PCTS:
            other = replace(image, resize=rule, crop_pct=crop_pct)
            options = f"--resize {rule}" if rule.startswith("stretch") else f"--resize {rule} --crop-pct {crop_pct:g}"
            if other != image:
                yield _Preprocessing(name=f"resized by {other.resize_text} ({options})", image=other)


class TrainedAccuracy:
    """Count the images that PyTorch classifies correctly.

    right_of: returns for each image whether logits (B, C) are right, or None for an unlabelled image; None without data
    or without PyTorch's logits.
    """

    def __init__(self, expected: float | None, right_of: RightOf | None) -> None:
        self._expected, self._right_of = expected, right_of
        self._right: list[bool | None] = []
        self._finding = ""

    def add(self, labels: Sequence[Label], trained: NDArray[Any]) -> None:
        """Add a batch of the data.  labels: as for the accuracy.  trained: (B, C), PyTorch's logits."""
        if self._right_of is not None:
            self._right += self._right_of(labels, trained)

    def try_others(self, reference: Reference, stream: ImageStream, on_progress: OnProgress = ignore) -> None:
        """Try other preprocessings.  stream: the images of all batches that were added, in this order."""
        known = [place for place, right in enumerate(self._right) if right is not None]
        if self._right_of is None or not known or (self._expected is not None and not self._below()):
            return
        sample = [known[place] for place in evenly_spaced(len(known), _SAMPLE)]
        right = np.array([self._right[place] for place in sample], bool)
        others = list(other_preprocessings(stream.bundle.manifest.image))
        wrong = np.flatnonzero(~right)
        if mcnemar(0, len(wrong), tries=len(others)) >= LEVEL:
            return
        indices = np.array(stream.taken)[sample]
        first = wrong[evenly_spaced(len(wrong), _TRIED_FIRST)]
        corrected = []
        for number, other in enumerate(others):
            on_progress(Progress("other preprocessings", number, len(others)))
            answers = _right_with(other, reference, stream, indices[first], self._right_of)
            corrected.append(0.0 if answers is None else answers.mean())
        tried = sorted(range(len(others)), key=lambda number: -corrected[number])[:_MAX_TRIED]
        better: list[tuple[float, str]] = []
        for other in (others[number] for number in tried if corrected[number] >= _SHARE_CORRECTED):
            also = _right_with(other, reference, stream, indices, self._right_of)
            if also is None or also.sum() <= right.sum():
                continue
            p = mcnemar(int((right & ~also).sum()), int((~right & also).sum()), tries=len(others))
            if p < LEVEL:
                better.append((float(also.mean()), f"{also.mean():.1%} {other.name}, p = {p:.1g}"))
        if better:
            better.sort(key=lambda each: -each[0])
            named = [words for share, words in better if share >= better[0][0] - _AS_GOOD]
            self._finding = (
                f"the preprocessing is probably wrong: PyTorch classifies {right.mean():.1%} of {len(sample)} images "
                f"correctly with the bundle's preprocessing, and {'; or '.join(named)} (McNemar's test, for "
                f"{len(others)} preprocessings tried); if the network was trained so, export the checkpoint again"
            )

    def _interval(self) -> tuple[int, int, float, float]:
        """Return (images that PyTorch classifies correctly, labelled images, low and high end of the accuracy)."""
        known = [right for right in self._right if right is not None]
        return sum(known), len(known), *share_interval(sum(known), len(known))

    def _below(self) -> bool:
        """Whether the whole interval of PyTorch's accuracy lies below the expected accuracy."""
        return self._expected is not None and self._interval()[-1] < self._expected

    def judged(self, accuracy: Check) -> Check:
        """Return a runner's accuracy check together with the judgement of PyTorch's accuracy."""
        cause = (self._finding,) if self._finding else ()
        lost = accuracy.reasons if accuracy.verdict == "failed" else ()  # too few images are not the cause
        if self._expected is None:
            verdict = "undecided" if cause and accuracy.verdict == "passed" else accuracy.verdict
            return replace(accuracy, verdict=verdict, reasons=(*lost, *cause)) if cause else accuracy
        if all(right is None for right in self._right):
            why = f"--expect-accuracy {self._expected:g}: PyTorch's accuracy was not measured: {accuracy.summary}"
            return replace(accuracy, verdict="failed", summary=why, reasons=(why,))
        right, images, low, high = self._interval()
        words = f"PyTorch's accuracy is {right / images:.2%} ({low:.2%} to {high:.2%}) on {images:,} images"
        words += f", expected {self._expected:.2%}"
        if not self._below():
            return replace(accuracy, summary=f"{accuracy.summary}; {words}")
        why = f"{words}: the preprocessing, the labels, the weights or the images are not those of training"
        reasons = (why, *lost, *cause) if cause or not accuracy.details.get("wrong_labels") else accuracy.reasons
        return replace(accuracy, verdict="failed", summary=f"{accuracy.summary}; {words}", reasons=reasons)


def _right_with(
    other: _Preprocessing,
    reference: Reference,
    stream: ImageStream,
    indices: NDArray[Any],
    right_of: RightOf,
) -> NDArray[Any] | None:
    """Return which images PyTorch classifies correctly; None if the preprocessing cannot resize an image."""
    right: list[bool | None] = []
    for start in range(0, len(indices), stream.batch):
        part = [int(index) for index in indices[start : start + stream.batch]]
        try:
            pixels = np.stack([stream.images.pixels(index, other.image) for index in part])
        except ImageError:
            return None
        tensors = other.image.tensor_from_pixels(pixels if other.colours is None else pixels[..., other.colours])
        with torch.inference_mode():
            logits = reference.model(torch.from_numpy(tensors)).numpy()
        right += right_of([stream.images.label(index) for index in part], logits)
    return np.array(right, bool)
