"""Write files and folders completely or not at all, and hash them."""

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
    """Return the hex SHA-256 of a file, read in blocks.  Errors: OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


@contextmanager
def new_folder(path: Path, *, force: bool = False) -> Iterator[Path]:
    """Yield an empty folder to fill; it becomes ``path`` if the block succeeds, and is deleted otherwise.

    The folder is filled beside ``path`` and then renamed, so an incomplete folder never appears at ``path``.
    force: replace an existing folder at ``path`` once the new folder is complete.
    Errors: OutputError when ``path`` exists and ``force`` is not set, or when writing fails.
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
                f"{path}: cannot be written: {exc.strerror or exc}; nothing was left behind",
                hint="choose another place with -o, or make room",
            ) from exc
    except BaseException as exc:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)
            if isinstance(exc, GmmvitError):
                exc.replace_path(staging, named)  # the path from the user; the staging folder is deleted
        for folder in reversed(created):
            folder.rmdir()
        raise


def require_free(path: Path, *, force: bool) -> None:
    """Check that a folder can be created at ``path``.  Errors: OutputError if an existing path may not be replaced."""
    if os.path.lexists(path) and not force:
        raise OutputError(f"{path} exists", hint="choose another place with -o, or replace it with --force")
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise OutputError(f"{path} is no folder, so --force does not replace it", hint="remove it by hand")


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
    staging.chmod(0o777 & ~_umask())  # mkdtemp creates it private
    require_free(path, force=force)  # another process may have created it meanwhile
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


def require_free_file(path: Path, *, force: bool) -> None:
    """Check that a file can be created at ``path``.

    Errors: OutputError when an existing path may not be replaced, or the parent folder does not exist.
    """
    if os.path.lexists(path) and (not force or path.is_dir()):
        raise OutputError(f"{path} exists", hint="choose another name, or replace the file with --force")
    if not path.parent.is_dir():
        raise OutputError(f"{path}: there is no folder {path.parent}", hint="make it, or choose another place")


@contextmanager
def new_file(path: Path, *, force: bool = False) -> Iterator[IO[bytes]]:
    """Yield a file to write; it becomes ``path`` if the block succeeds, and is deleted otherwise.

    Errors: OutputError when ``path`` exists and ``force`` is not set, or when writing fails.
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
            f"{path}: cannot be written: {exc.strerror or exc}; nothing was left behind",
            hint="choose another place, or make room",
        ) from exc
    finally:
        if staging is not None:
            staging.unlink(missing_ok=True)


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask
