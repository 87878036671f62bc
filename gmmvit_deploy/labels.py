"""Names that tell classes apart: a data set can have the same label twice, as ImageNet has ``crane``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

__all__ = ["distinct_names"]


def distinct_names(labels: Sequence[str]) -> tuple[str, ...]:
    """Return a distinct name for each class: the label, with the index of the class if other classes have this label.

    ``("crane", "hen", "crane")`` gives ``("crane (0)", "hen", "crane (2)")``.
    """
    counts = Counter(labels)
    names = tuple(f"{label} ({index})" if counts[label] > 1 else label for index, label in enumerate(labels))
    if len(set(names)) == len(names):
        return names
    # A label such as "crane (0)" can equal a name made from an index.
    return tuple(f"{label} ({index})" for index, label in enumerate(labels))
