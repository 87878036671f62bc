"""Count answers by how sure they are, and by class: what an operator compares with the answers at the start.

    kind         of an image                                                          a bucket
    probability  the largest probability of a class                                   0.6-0.8, which contains 0.6
    margin       of the decision, in logits (`cascade.decision_margins`)              2-3
    class        its class; of a multi-label network, each label that is present      the distinct name of the class

A network of a single class has no margin. Nothing of an image is kept but these counts.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from .cascade import decision_margins
from .labels import LabelSet

if TYPE_CHECKING:
    from numpy.typing import NDArray

AnswerCounts = Counter[tuple[str, str]]
"""(kind, bucket) → the number of images."""
_EDGES = {
    # Narrow where a trained network has most of its answers.
    "probability": (0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 0.99, 1),
    "margin": (0, 0.5, 1, 2, 3, 4, 6, 8, 12, 16, 24, np.inf),
}
_BUCKETS = {kind: [f"{low:g}-{high:g}" for low, high in pairwise(edges)] for kind, edges in _EDGES.items()}
SURENESS = tuple((kind, bucket) for kind, buckets in _BUCKETS.items() for bucket in buckets)
"""All (kind, bucket) but those of classes."""


def count_answers(logits: NDArray[Any], label_set: LabelSet) -> AnswerCounts:
    """Return the counts of B images that are above 0.  logits: (B, C); rows that are not finite do not count."""
    logits = logits[np.isfinite(logits).all(1)]
    largest = logits.max(1, keepdims=True)
    values = {}
    if label_set.task == "multi-label":
        thresholds = np.array(label_set.threshold_logits)
        values["probability"] = label_set.probabilities(largest[:, 0])
        values["margin"] = decision_margins(logits, thresholds)
        classes = np.nonzero(logits >= thresholds)[1]
    else:
        # In float32, a tenth of the time of all probabilities in float64: a bucket needs no more digits.
        values["probability"] = 1 / np.exp(logits - largest).sum(1)
        classes = logits.argmax(1)
        if logits.shape[1] > 1:
            values["margin"] = decision_margins(logits)
    counts: AnswerCounts = Counter()
    for kind, of_images in values.items():
        places = np.digitize(of_images, _EDGES[kind][1:-1])
        counts.update((kind, _BUCKETS[kind][place]) for place in places.tolist())
    names = label_set.names
    counts.update(("class", names[index] if names else str(index)) for index in classes.tolist())
    return counts


def sureness(counts: AnswerCounts) -> dict[str, dict[str, int]]:
    """Return kind → bucket → number, without classes; empty without images."""
    nested = {kind: {bucket: counts[kind, bucket] for bucket in buckets} for kind, buckets in _BUCKETS.items()}
    return {kind: buckets for kind, buckets in nested.items() if any(buckets.values())}
