"""Image files by name: files, folders and patterns."""

from __future__ import annotations

import glob
from collections.abc import Iterable
from pathlib import Path

from gmmvit_deploy.errors import InputError

__all__ = ["image_files"]

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")


def image_files(arguments: Iterable[str]) -> list[Path]:
    """Files, folders (searched all the way down for images) and glob patterns → files, sorted within each.

    Errors: InputError when an argument names nothing, or a folder holds no image.
    """
    files: list[Path] = []
    for argument in arguments:
        path = Path(argument)
        if path.is_dir():
            matches = sorted(f for f in path.rglob("*") if f.suffix.lower() in SUFFIXES and f.is_file())
            if not matches:
                raise InputError(f"{argument}: the folder holds no {', '.join(SUFFIXES)} file")
        elif path.exists():
            matches = [path]
        else:
            matches = sorted(Path(name) for name in glob.glob(argument, recursive=True) if Path(name).is_file())  # noqa: PTH207
            if not matches:
                raise InputError(f"{argument}: no such file, folder or match")
        files += matches
    return list(dict.fromkeys(files))
