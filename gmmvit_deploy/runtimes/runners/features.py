"""Write the features of classified files: an .npz file that numpy, scikit-learn and vector databases read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gmmvit_deploy.files.writing import new_file
from gmmvit_deploy.runtimes.runners.classify import Classification

__all__ = ["write_features"]


def write_features(path: Path, answers: Sequence[Classification], *, force: bool = False) -> None:
    """Write the arrays ``features``, float32 (N, D), and ``files``, the N paths as text, in the order of ``answers``.

    Files without features, because they could not be decoded, are left out.
    force: replace an existing file.
    Errors: OutputError when the file exists and ``force`` is False, or when writing fails.
    """
    import numpy as np

    answered = [answer for answer in answers if answer.features is not None]
    rows = [answer.features for answer in answered if answer.features is not None]
    features = np.stack(rows) if rows else np.zeros((0, 0), np.float32)
    with new_file(path, force=force) as file:
        np.savez(file, features=features, files=np.array([str(answer.path) for answer in answered], dtype=np.str_))
