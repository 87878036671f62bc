"""Find labels that cannot judge an accuracy: those that are permuted, and those that agree with PyTorch only by chance.

    chance    Σ_c (share of the images labelled c) · (share of the images that PyTorch calls c), the share of right
              answers if labels and answers had nothing to do with each other; as in Cohen's kappa

A quantised network is as often right as PyTorch on such labels, whatever its answers are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.intervals import mcnemar, share_interval

if TYPE_CHECKING:
    from numpy.typing import NDArray

LEVEL = 0.01
"""The level of the tests that look for a cause of a low accuracy, corrected for the number of causes tried."""
_Z_ABOVE_CHANCE = 3.0
"""Labels without relation to the answers pass in one of 700 runs."""
_IMAGES_A_CLASS = 5
_SEPARATED_SHARE = 0.5
"""Labels are reported as permuted only if, in another order, they are correct for at least this share of the images."""


def wrong_labels(answers: NDArray[Any], names: Sequence[str]) -> str:
    """Return why the labels of images cannot judge the accuracy of a network, or "".

    answers: (C, C), the number of images for each pair (labelled class, class that PyTorch predicts); not all 0.
    names: of the classes.
    """
    right, images = int(answers.trace()), int(answers.sum())
    return permuted_labels(answers, names) or unrelated_labels(right, images, chance_of(answers.sum(1), answers.sum(0)))


def chance_of(labels: NDArray[Any], answers: NDArray[Any]) -> float:
    """Return the chance, as defined at the head of this module.

    labels, answers: (C,), the number of images with each label, and with each answer of PyTorch.
    """
    return float(labels @ answers) / float(labels.sum()) ** 2


def unrelated_labels(right: int, images: int, chance: float) -> str:
    """Return a message if PyTorch's accuracy does not lie clearly above chance, else ""."""

    def above_chance(right: int) -> bool:
        return share_interval(right, images, z=_Z_ABOVE_CHANCE)[0] > chance

    if above_chance(right):
        return ""
    too_few = "" if above_chance(round(images * (1 + chance) / 2)) else "too few or "
    return (
        f"these labels cannot judge accuracy: PyTorch is right on {right:,} of {images:,} images, which is not clearly "
        f"more than the {chance:.1%} by chance; the labels are wrong, the network is not trained, or the images are "
        f"{too_few}nearly all of one class"
    )


def permuted_labels(answers: NDArray[Any], names: Sequence[str]) -> str:
    """Return a message if PyTorch separates the classes under other names, so that the labels may be permuted, or "".

    With few images, some permutation always fits. So either at least `_IMAGES_A_CLASS` images per class are required;
    or some classes have exchanged their names, and McNemar's test, corrected for the number of possible exchanges of as
    many classes, shows that PyTorch is right on more images.
    answers, names: as in `wrong_labels`.
    """
    right, images = int(answers.trace()), int(answers.sum())
    renamed = _best_renaming(answers)
    enough = images >= _IMAGES_A_CLASS * int((answers.sum(1) > 0).sum())
    if not enough or _share(answers, renamed) < max(_SEPARATED_SHARE, 2 * right / images + 0.1):
        renamed = {true: true for true in range(len(names))} | _exchanged(answers, renamed)
    wrong = [f"PyTorch calls the images of {names[true]} {names[new]}" for true, new in renamed.items() if true != new]
    if not wrong:
        return ""
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    return (
        f"the labels are probably permuted: PyTorch classifies {right / images:.1%} of the images correctly with the "
        f"bundle's labels, and {_share(answers, renamed):.1%} with the same labels in another order: "
        f"{', '.join(wrong[:3])}{more}; export again with --labels in the order of training"
    )


def _share(answers: NDArray[Any], renamed: Mapping[int, int]) -> float:
    """Return the share of the images that PyTorch classifies correctly with these names."""
    right: int = sum(int(answers[true, answer]) for true, answer in renamed.items())
    return right / int(answers.sum())


def _exchanged(answers: NDArray[Any], renamed: Mapping[int, int]) -> dict[int, int]:
    """Return the names that classes have exchanged among themselves, by McNemar's test of each group of classes."""
    exchanged: dict[int, int] = {}
    for first in renamed:
        group = [first]
        while (new := renamed.get(group[-1])) is not None and new not in group:
            group.append(new)
        if new != first or first in exchanged or len(group) == 1:
            continue  # not a closed group, or already judged
        moved = {true: renamed[true] for true in group}
        lost = sum(int(answers[true, true]) for true in moved)
        gained = sum(int(answers[true, new]) for true, new in moved.items())
        tries = math.perm(len(answers), len(moved))
        if gained > lost and mcnemar(lost, gained, tries=tries) < LEVEL:
            exchanged |= moved
    return exchanged


def _best_renaming(answers: NDArray[Any]) -> dict[int, int]:
    """Map true classes to different classes that PyTorch predicts for them, the most frequent pairs first."""
    import numpy as np

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
