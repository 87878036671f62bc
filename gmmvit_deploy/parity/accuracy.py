"""Is the runner right as often as PyTorch is?  Judged on an interval, not on the number alone.

gate g as in MLPerf:  runner's top-1 ≥ g · PyTorch's top-1;   0.999 for fp32, fp16, bf16;  0.99 for int8, fp8
passed     the whole interval of the difference lies at or above (g − 1) · PyTorch's top-1
failed     the whole interval lies below it
undecided  it lies on both sides: too few images to decide
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.parity.paired import Paired, images_needed, mcnemar
from gmmvit_deploy.parity.verdict import Check, Verdict
from gmmvit_deploy.precision import Precision

__all__ = ["GATES", "Accuracy", "Classes", "classes_of", "gate_of"]

GATES: dict[Precision, float] = {"fp32": 0.999, "fp16": 0.999, "bf16": 0.999, "int8": 0.99, "fp8": 0.99}
_TOP = 5
_IMAGES_A_CLASS = 5
_TOLD_APART = 0.5


def gate_of(precision: Precision, asked: float | None) -> float:
    """Errors: InputError on a gate that is no share."""
    if asked is not None and not 0 < asked <= 1:
        raise InputError(f"--gate: expected a share of PyTorch's accuracy, such as 0.999, got {asked}")
    return asked if asked is not None else GATES[precision]


@dataclass(frozen=True, slots=True, kw_only=True)
class Classes:
    """From the data's class index to the index of the bundle's logit.

    to_logit: None where the data's classes are the bundle's, in order.  note: what was done, or is not known.
    """

    to_logit: tuple[int, ...] | None
    note: str


def classes_of(data: Sequence[str], labels: Sequence[str], source: str) -> Classes:
    """Bring the classes of the data and the labels of the bundle together, by name.

    Errors: InputError when they are not the same classes.
    """
    if not data:
        return Classes(to_logit=None, note="the data names no classes; its labels are taken as indices of the logits")
    if tuple(data) == tuple(labels):
        return Classes(to_logit=None, note="")
    if set(data) == set(labels):
        return Classes(
            to_logit=tuple(list(labels).index(name) for name in data),
            note="the data lists the classes in another order than the bundle; they were matched by name",
        )
    alien = [name for name in data if name not in set(labels)]
    if len(data) < len(labels) and not alien:
        return Classes(
            to_logit=tuple(list(labels).index(name) for name in data),
            note=f"the data has {len(data)} of the bundle's {len(labels)} classes",
        )
    raise InputError(
        f"{source}: its classes are not the bundle's: {len(data)} of them, such as {', '.join(alien[:3] or data[:3])}; "
        f"the bundle has {len(labels)}, such as {', '.join(labels[:3])}",
        hint="take the data set that the model was trained for, or export with its labels",
    )


class Accuracy:
    """Collects right and wrong, image after image, of PyTorch and one runner."""

    def __init__(self, labels: Sequence[str], classes: Classes) -> None:
        count = len(labels)
        self._labels, self._classes = labels, classes
        self._top1 = np.zeros((count, 2, 2), np.int64)  # true class, PyTorch right, runner right
        self._top5 = np.zeros((2, 2), np.int64)
        self._answers = np.zeros((count, count), np.int64)  # of PyTorch: true class, class it chose
        self._unlabelled = 0

    def add(self, labels: Sequence[int | None], trained: NDArray[Any], found: NDArray[Any]) -> None:
        """labels: the data's; trained, found: logits (B, C).  A row that is not finite is wrong.

        Errors: InputError when a label is none of the model's classes.
        """
        known = np.array([label is not None for label in labels], bool)
        self._unlabelled += int((~known).sum())
        raw = np.array([label for label in labels if label is not None], np.int64)
        if not len(raw):
            return
        if raw.min() < 0 or raw.max() >= len(self._labels):
            raise InputError(f"a label of the data is {raw.max()}; the model has {len(self._labels)} classes")
        trained, found = trained[known], np.where(np.isfinite(found[known]), found[known], -np.inf)
        true = raw if self._classes.to_logit is None else np.array(self._classes.to_logit)[raw]
        np.add.at(self._answers, (true, trained.argmax(1)), 1)
        right, also = _right(trained, true, 1), _right(found, true, 1)
        np.add.at(self._top1, (true, right.astype(int), also.astype(int)), 1)
        right, also = _right(trained, true, _TOP), _right(found, true, _TOP)
        np.add.at(self._top5, (right.astype(int), also.astype(int)), 1)

    @property
    def top1(self) -> Paired:
        return _paired(self._top1.sum(0))

    def per_class(self) -> list[dict[str, Any]]:
        """For every class that occurs: images, right by PyTorch, right by the runner."""
        return [
            {
                "class": self._labels[index],
                "images": int(counts.sum()),
                "pytorch": int(counts[1].sum()),
                "runner": int(counts[:, 1].sum()),
            }
            for index, counts in enumerate(self._top1)
            if counts.sum()
        ]

    def check(self, gate: float) -> Check:
        """Judge top-1 against the gate; top-5 is told and not gated."""
        if not self._top1.sum():
            why = f"none of the {self._unlabelled} images has a true class"
            return Check(name="accuracy", verdict="skipped", says=why, reasons=(why,))
        pairs = self.top1
        low, high = pairs.interval()
        allowed = (gate - 1) * pairs.wanted
        needed = images_needed(pairs, allowed)
        verdict: Verdict = "passed" if low >= allowed else "failed" if high < allowed else "undecided"
        says = (
            f"top-1 {pairs.found:.2%}, PyTorch {pairs.wanted:.2%}; difference {pairs.difference:+.2%} "
            f"({low:+.2%} to {high:+.2%}), gate {allowed:+.3%}, on {pairs.images:,} images"
        )
        reasons = [*_why(verdict, pairs, allowed, needed)]
        if mixed_up := self._order_problem(pairs):
            verdict = "failed"
            reasons.append(mixed_up)
        return Check(
            name="accuracy",
            verdict=verdict,
            says=says,
            reasons=tuple(reasons),
            details={
                "images": pairs.images,
                "unlabelled": self._unlabelled,
                "gate": gate,
                "lowest_difference_allowed": allowed,
                "top1": _numbers(pairs),
                "top5": _numbers(_paired(self._top5)) if len(self._labels) > _TOP else None,
                "images_needed": needed if verdict == "undecided" else None,
                "classes": self._classes.note,
                "per_class": self.per_class(),
            },
        )

    def _order_problem(self, pairs: Paired) -> str:
        """PyTorch tells the classes apart, under other names: the labels are permuted.

        Some permutation fits any few answers, so several images of each class are asked for.
        """
        if pairs.images < _IMAGES_A_CLASS * np.count_nonzero(self._answers.sum(1)):
            return ""
        renamed = _best_renaming(self._answers)
        share = sum(int(self._answers[true, answer]) for true, answer in renamed.items()) / pairs.images
        if share < max(_TOLD_APART, 2 * pairs.wanted + 0.1):
            return ""
        wrong = [f"{self._labels[true]} is called {self._labels[new]}" for true, new in renamed.items() if true != new]
        return (
            f"labels: PyTorch is right on {pairs.wanted:.1%} of the images by the bundle's labels, and on {share:.1%} "
            f"by the same labels in another order: {', '.join(wrong[:3])}"
        )


def _best_renaming(answers: NDArray[Any]) -> dict[int, int]:
    """True class → the class it is called, one to one, the most frequent first.  answers: (C, C) counts."""
    rows, columns = np.unravel_index(np.argsort(-answers, axis=None, kind="stable"), answers.shape)
    renamed: dict[int, int] = {}
    taken: set[int] = set()
    for true, answer in zip(rows.tolist(), columns.tolist(), strict=True):
        if answers[true, answer] == 0:
            break
        if true not in renamed and answer not in taken:
            renamed[true] = answer
            taken.add(answer)
    return renamed


def _right(logits: NDArray[Any], true: NDArray[Any], top: int) -> NDArray[Any]:
    """Whether fewer than ``top`` classes come before the true one; of equal logits the first comes first."""
    own = logits[np.arange(len(true)), true][:, None]
    classes = np.arange(logits.shape[1])
    before = (logits > own) | ((logits == own) & (classes < true[:, None]))
    right: NDArray[Any] = (before.sum(1) < top) & np.isfinite(own[:, 0])
    return right


def _paired(counts: NDArray[Any]) -> Paired:
    return Paired(both=int(counts[1, 1]), lost=int(counts[1, 0]), gained=int(counts[0, 1]), neither=int(counts[0, 0]))


def _numbers(pairs: Paired) -> dict[str, Any]:
    low, high = pairs.interval()
    return {
        "pytorch": pairs.wanted,
        "runner": pairs.found,
        "difference": pairs.difference,
        "interval": [low, high],
        "mcnemar_p": mcnemar(pairs.lost, pairs.gained),
        **asdict(pairs),
    }


def _why(verdict: Verdict, pairs: Paired, allowed: float, needed: int | None) -> list[str]:
    changed = f"{pairs.lost} lost, {pairs.gained} gained of {pairs.images:,}"
    if verdict == "failed":
        return [
            f"accuracy is lost: {changed}, at most {-allowed:.3%} may be (McNemar p = "
            f"{mcnemar(pairs.lost, pairs.gained):.2g})"
        ]
    if verdict == "undecided":
        more = (
            f"{needed:,} images like these are enough"
            if needed
            else "the measured difference itself is beyond the gate"
        )
        return [f"too few images to decide: {changed}; {more}"]
    return []
