"""Write files and folders, completely or not at all, and compute hashes."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from gmmvit_deploy.errors import GmmvitError, OutputError

__all__ = ["new_file", "new_folder", "require_free", "require_free_file", "sha256_of_bytes", "sha256_of_file"]


def sha256_of_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_of_file(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file, read in blocks.  Errors: OSError when the file cannot be read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


@contextmanager
def new_folder(path: Path, *, force: bool = False) -> Iterator[Path]:
    """Yield an empty folder to fill; the folder becomes ``path`` if the block succeeds, and is deleted otherwise.

    The folder is filled under another name beside ``path`` and then renamed, so an incomplete folder never appears at
    ``path``.
    force: True to replace an existing folder at ``path`` when the new folder is complete.
    Errors: OutputError when ``path`` exists and ``force`` is False, or when writing fails.
    """
    named, path = path, Path(os.path.abspath(path))
    require_free(path, force=force)
    created: list[Path] = []
    staging: Path | None = None
    try:
        try:
            created = _make_parents(path.parent)
            staging = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.partial-"))
            yield staging
            _publish(staging, path, force=force)
        except OSError as exc:
            raise OutputError(
                f"{path}: cannot be written: {exc.strerror or exc}; no partial output remains",
                hint="type -o with another path, or free space on the disk",
            ) from exc
    except BaseException as exc:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)
            if isinstance(exc, GmmvitError):
                exc.replace_path(staging, named)  # name the user's path, because the staging folder is deleted
        for folder in reversed(created):
            folder.rmdir()
        raise


def require_free(path: Path, *, force: bool) -> None:
    """Check that a folder can be created at ``path``.

    Errors: OutputError when ``path`` exists and ``force`` is False, or when ``path`` is not a folder.
    """
    if os.path.lexists(path) and not force:
        raise OutputError(f"{path} exists", hint="type -o with another path, or add --force to replace the folder")
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise OutputError(
            f"{path}: expected a folder, got a file or link, which --force does not replace",
            hint="type -o with another path, or remove the file or link",
        )


def _make_parents(parent: Path) -> list[Path]:
    missing = []
    while not parent.exists():
        missing.append(parent)
        parent = parent.parent
    created: list[Path] = []
    for folder in reversed(missing):
        folder.mkdir()
        created.append(folder)
    return created


def _publish(staging: Path, path: Path, *, force: bool) -> None:
    staging.chmod(0o777 & ~_umask())  # mkdtemp creates folders that only their owner can read
    require_free(path, force=force)  # another process may have created path in the meantime
    if not path.exists():
        staging.rename(path)
        return
    old = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.replaced-"))
    path.rename(old / path.name)
    try:
        staging.rename(path)
    except OSError:
        (old / path.name).rename(path)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def require_free_file(path: Path, *, force: bool, fixed_name: bool = False) -> None:
    """Check that a file can be created at ``path``.

    fixed_name: True if no option of the user changes the path; the hint then names --force only.
    Errors: OutputError when ``path`` exists and ``force`` is False, when ``path`` is a folder, or when the parent
    folder does not exist.
    """
    if os.path.lexists(path) and (not force or path.is_dir()):
        other = "" if fixed_name else "type another path, or "
        raise OutputError(f"{path} exists", hint=f"{other}add --force to replace the file")
    if not path.parent.is_dir():
        raise OutputError(
            f"{path}: the folder {path.parent} does not exist", hint="create the folder, or type another path"
        )


@contextmanager
def new_file(path: Path, *, force: bool = False) -> Iterator[IO[bytes]]:
    """Yield a file to write; the file becomes ``path`` if the block succeeds, and is deleted otherwise.

    Errors: OutputError when ``path`` exists and ``force`` is False, or when writing fails.
    """
    require_free_file(path, force=force)
    staging: Path | None = None
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.partial-")
        staging = Path(name)
        with os.fdopen(handle, "wb") as file:
            yield file
        staging.chmod(0o666 & ~_umask())
        staging.replace(path)
    except OSError as exc:
        raise OutputError(
            f"{path}: cannot be written: {exc.strerror or exc}; no partial output remains",
            hint="type another path, or free space on the disk",
        ) from exc
    finally:
        if staging is not None:
            staging.unlink(missing_ok=True)


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask
