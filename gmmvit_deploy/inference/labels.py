"""How the logits of an image become labels: softmax and the likeliest class, or sigmoid and a threshold for each class.

task          probability of class c          decision
single-label  exp(x_c) / Σ_k exp(x_k)         the class of the largest logit
multi-label   1 / (1 + exp(−x_c))             every class whose probability is at least its threshold
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from numpy.typing import NDArray

Task = Literal["single-label", "multi-label"]
"""``single-label``: each image has exactly one class.  ``multi-label``: an image has any number of classes."""
TASKS: tuple[Task, ...] = get_args(Task)
DEFAULT_TOP = 5
"""The number of labels in a served answer, unless the request states another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A class with its probability.

    threshold: the least probability at which an image of a multi-label network has the label; None for single-label.
    """

    label: str
    index: int
    probability: float
    threshold: float | None = None

    @property
    def present(self) -> bool:
        """True if the probability reaches the threshold; True for every prediction of a single-label network."""
        return self.threshold is None or self.probability >= self.threshold

    def to_json(self) -> dict[str, Any]:
        """Return label, index and probability; for a multi-label network also the threshold, and ``present``."""
        values = {"label": self.label, "index": self.index, "probability": self.probability}
        return values if self.threshold is None else {**values, "threshold": self.threshold, "present": self.present}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """The k most likely classes of each of B images, likeliest first.

    indices: integers (B, k).  probabilities: float64 (B, k).
    present: bool (B, k), whether the probability reaches the threshold; True everywhere for a single-label network.
    """

    indices: NDArray[Any]
    probabilities: NDArray[Any]
    present: NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelSet:
    """The labels of a network, and how its logits become labels.

    labels: the label of each class in the order of the class index; labels may be repeated.
    thresholds: the threshold of each class of a multi-label network, between 0 and 1; empty for single-label.
    Errors: ValueError when the thresholds do not fit the task and the labels.
    """

    labels: tuple[str, ...]
    task: Task = "single-label"
    thresholds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ValueError(f"task: expected one of {', '.join(TASKS)}, got {self.task!r}")
        expected = len(self.labels) if self.task == "multi-label" else 0
        if len(self.thresholds) != expected:
            raise ValueError(f"thresholds: expected {expected} numbers, got {len(self.thresholds)}")
        wrong = [number for number in self.thresholds if not isinstance(number, float) or not 0 < number < 1]
        if wrong:
            raise ValueError(f"thresholds: expected numbers above 0 and below 1, got {wrong[0]!r}")

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> LabelSet:
        """Return the labels that the parameters of a served model state.

        A model without the parameters has no labels, and a model without a task is single-label.
        Errors: ValueError when the parameters contradict each other.
        """
        task: Any = parameters.get("gmmvit_task", "single-label")
        return cls(
            labels=tuple(json.loads(parameters.get("gmmvit_labels", "[]"))),
            task=task,
            thresholds=tuple(json.loads(parameters.get("gmmvit_thresholds", "[]"))),
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The distinct name of each class."""
        return distinct_names(self.labels)

    @property
    def threshold_logits(self) -> tuple[float, ...]:
        """The logit at which the probability of each class of a multi-label network is its threshold."""
        return tuple(math.log(threshold / (1 - threshold)) for threshold in self.thresholds)

    def probabilities(self, logits: NDArray[Any]) -> NDArray[Any]:
        """Return the probabilities (…, C) of logits (…, C), computed in float64, so that a softmax adds up to 1."""
        import numpy as np

        exact: NDArray[Any] = logits.astype(np.float64)
        shares: NDArray[Any]
        if self.task == "multi-label":
            shares = 0.5 * (1 + np.tanh(0.5 * exact))  # the sigmoid; its exponential would overflow
        else:
            exponentials = np.exp(exact - exact.max(-1, keepdims=True))
            shares = exponentials / exponentials.sum(-1, keepdims=True)
        return shares

    def ranked(self, logits: NDArray[Any], top: int) -> Ranked:
        """Return the k = ``top`` most likely classes of each row of logits (B, C).

        For a multi-label network, k is larger if a class further down reaches its threshold, in any of the rows.
        Errors: ValueError when a logit is NaN or infinite.
        """
        import numpy as np

        if not np.isfinite(logits).all():
            raise ValueError("the network gave logits that are not finite")
        indices = np.argsort(-logits, axis=-1, kind="stable")
        probabilities = np.take_along_axis(self.probabilities(logits), indices, axis=-1)
        present = np.ones(indices.shape, bool)
        if self.task == "multi-label":
            present = probabilities >= np.array(self.thresholds)[indices]
            top = max(top, int(np.flatnonzero(present.any(axis=0)).max(initial=-1)) + 1)
        return Ranked(indices=indices[:, :top], probabilities=probabilities[:, :top], present=present[:, :top])

    def predictions(self, logits: NDArray[Any], top: int) -> tuple[Prediction, ...]:
        """Return the ``top`` most likely classes of a row of logits (C,), likeliest first.

        For a multi-label network, every class that reaches its threshold is among the predictions, also beyond ``top``.
        Errors: those of `ranked`.
        """
        ranked = self.ranked(logits[None], top)
        return tuple(
            self._prediction(int(index), float(probability))
            for rank, (index, probability, present) in enumerate(
                zip(ranked.indices[0], ranked.probabilities[0], ranked.present[0], strict=True)
            )
            if rank < top or present
        )

    def decided(self, predictions: Sequence[Prediction]) -> tuple[str, ...]:
        """Return the distinct names of the classes that the image has, in the order of the class index.

        predictions: the result of `predictions`.
        """
        names = self.names
        chosen = predictions[:1] if self.task == "single-label" else [guess for guess in predictions if guess.present]
        return tuple(names[guess.index] if names else guess.label for guess in sorted(chosen, key=lambda g: g.index))

    def _prediction(self, index: int, probability: float) -> Prediction:
        return Prediction(
            label=self.labels[index] if index < len(self.labels) else str(index),
            index=index,
            probability=probability,
            threshold=self.thresholds[index] if self.thresholds else None,
        )


def distinct_names(labels: Sequence[str]) -> tuple[str, ...]:
    """Return a distinct name for each class: the label, with the index of the class if other classes have this label.

    The names are in Unicode's NFC.

    ``("crane", "hen", "crane")`` gives ``("crane (0)", "hen", "crane (2)")``.
    """
    labels = [unicodedata.normalize("NFC", label) for label in labels]
    counts = Counter(labels)
    names = tuple(f"{label} ({index})" if counts[label] > 1 else label for index, label in enumerate(labels))
    if len(set(names)) == len(names):
        return names
    # A label such as "crane (0)" can equal a name made from an index.
    return tuple(f"{label} ({index})" for index, label in enumerate(labels))
