"""Read the files of a data set from a folder or a tar archive."""

from __future__ import annotations

import gzip
import tarfile
import zlib
from pathlib import Path

from gmmvit_deploy.errors import InputError

_BROKEN = (OSError, EOFError, tarfile.TarError, zlib.error)
"""Exceptions that reading a damaged archive raises."""


def members(path: Path) -> set[str]:
    """Return the names of all files below a folder or in a tar archive.  Errors: InputError for anything else."""
    if path.is_dir():
        return {file.name for file in path.rglob("*") if file.is_file()}
    return {Path(name).name for name in _archive_names(path)}


def member(path: Path, name: str) -> bytes:
    """Return the content of the only file called ``name``, decompressed if it ends in .gz.  Errors: InputError."""
    try:
        if path.is_dir():
            (only,) = [file for file in path.rglob("*") if file.name == name and file.is_file()]
            data = only.read_bytes()
        else:
            (full,) = [full for full in _archive_names(path) if Path(full).name == name]
            with tarfile.open(path) as archive:
                file = archive.extractfile(full)
                data = file.read() if file else b""
        return gzip.decompress(data) if name.endswith(".gz") else data
    except ValueError as exc:
        raise InputError(f"{path}: expected exactly one file called {name} in this folder or archive") from exc
    except _BROKEN as exc:
        raise InputError(f"{path}: {name} cannot be read: {exc}") from exc


def _archive_names(path: Path) -> list[str]:
    try:
        with tarfile.open(path) as archive:
            return [entry.name for entry in archive if entry.isfile()]
    except FileNotFoundError as exc:
        raise InputError(f"{path}: no such file or folder") from exc
    except _BROKEN as exc:
        raise InputError(f"{path}: expected a folder or a tar archive: {exc}") from exc
