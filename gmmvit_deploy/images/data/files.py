"""What the arguments and options of a command name: image files, folders, glob patterns, and kinds of data.

The command line imports this module without importing the readers of the data.
"""

from __future__ import annotations

import glob
from collections.abc import Iterable
from pathlib import Path

from gmmvit_deploy.errors import InputError

__all__ = ["KINDS", "SPLITS", "SUFFIXES", "image_files"]

KINDS = ("cifar10", "cifar100", "svhn", "mnist", "tiny-imagenet", "folder", "table", "array", "digits")
"""The kinds of data that the options ``--data`` and ``--calibration`` accept."""
SPLITS = ("test", "train")
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
"""Endings of the names of image files."""


def image_files(arguments: Iterable[str]) -> list[Path]:
    """Return the files that the arguments name, in the order of the arguments and without duplicates.

    An argument is a file, a folder, or a glob pattern. A folder stands for all images in the folder and in its
    subfolders. The files of each folder and the files of each pattern are sorted.
    Errors: InputError when an argument matches no file, or a folder contains no image.
    """
    files: list[Path] = []
    for argument in arguments:
        path = Path(argument)
        if path.is_dir():
            matches = sorted(f for f in path.rglob("*") if f.suffix.lower() in SUFFIXES and f.is_file())
            if not matches:
                raise InputError(f"{argument}: the folder contains no image file ({', '.join(SUFFIXES)})")
        elif path.exists():
            matches = [path]
        else:
            matches = sorted(Path(name) for name in glob.glob(argument, recursive=True) if Path(name).is_file())  # noqa: PTH207
            if not matches:
                raise InputError(f"{argument}: no such file or folder, and no file matches it as a pattern")
        files += matches
    return list(dict.fromkeys(files))
