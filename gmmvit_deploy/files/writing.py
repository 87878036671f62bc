"""Write files and folders, completely or not at all, and compute hashes."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from gmmvit_deploy.errors import GmmvitError, OutputError
from gmmvit_deploy.files.leftovers import (
    locked_file,
    locked_folder,
    remove_leftovers,
    remove_unlocked,
    unlocked_paths,
)


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

    It is filled beside ``path``, written to the disk and then renamed, so ``path`` is never incomplete, not even after
    a loss of power. What killed processes left is removed first.
    Errors: OutputError when ``path`` exists and ``force`` is False, when it has less than half of the names of the new
    folder, so that it is no earlier output, or when writing fails.
    """
    named, path = path, Path(os.path.abspath(path))
    remove_leftovers()
    _recover(path)
    require_free(path, force=force)
    created: list[Path] = []
    staging: Path | None = None
    with ExitStack() as locks:
        try:
            try:
                created = _make_parents(path.parent)
                staging, lock = locked_folder(f".{path.name}.partial-", path.parent)
                locks.callback(os.close, lock)
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


def _recover(path: Path) -> None:
    """Remove what killed processes left beside ``path``, or put back the folder that such a process was replacing."""
    remove_unlocked(path.parent, f".{path.name}.partial-")
    for old in unlocked_paths(path.parent, f".{path.name}.replaced-"):
        if (old / path.name).exists() and not os.path.lexists(path):
            (old / path.name).rename(path)
        shutil.rmtree(old, ignore_errors=True)


def require_free(path: Path, *, force: bool, instead: str = "") -> None:
    """Check that a folder can be created at ``path``.  instead: another way to go on, for the hint.

    Errors: OutputError when ``path`` exists and ``force`` is False, or when ``path`` is not a folder.
    """
    if os.path.lexists(path) and not force:
        other = f", {instead}," if instead else ","
        raise OutputError(
            f"{path} exists", hint=f"type -o with another path{other} or add --force to replace the folder"
        )
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
    for folder, _, names in os.walk(staging, topdown=False):
        for name in names:
            _sync(Path(folder) / name)
        _sync(Path(folder))
    require_free(path, force=force)  # another process may have created path in the meantime
    if not path.exists():
        staging.rename(path)
        _sync(path.parent)
        return
    _require_earlier_output(path, staging)
    old, lock = locked_folder(f".{path.name}.replaced-", path.parent)
    try:
        path.rename(old / path.name)
        try:
            staging.rename(path)
        except OSError:
            (old / path.name).rename(path)
            raise
        _sync(path.parent)
    finally:
        shutil.rmtree(old, ignore_errors=True)
        os.close(lock)


def _require_earlier_output(path: Path, staging: Path) -> None:
    held, names = sorted(entry.name for entry in path.iterdir()), {entry.name for entry in staging.iterdir()}
    if held and 2 * len(names & {*held}) < len(names):
        raise OutputError(
            f"{path}: --force replaces an earlier output of this command, but the folder holds {', '.join(held[:6])}",
            hint="type -o with another path, or remove the folder",
        )


def _sync(path: Path) -> None:
    """Write a file or the names in a folder to the disk: a rename must not reach the disk before the content does."""
    if path.is_symlink():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as exc:
        if exc.errno != errno.EINVAL:  # some file systems cannot sync a folder
            raise
    finally:
        os.close(descriptor)


def require_free_file(path: Path, *, force: bool, fixed_name: bool = False) -> None:
    """Check that a file can be created at ``path``.  fixed_name: no option changes the path; the hint names --force
    only.

    Errors: OutputError when ``path`` exists and ``force`` is False, is a folder, or is in no folder.
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

    It is written to the disk before it becomes ``path``. What killed processes left beside ``path`` is removed.
    Errors: OutputError when ``path`` exists and ``force`` is False, or when writing fails.
    """
    require_free_file(path, force=force)
    remove_unlocked(path.parent, f".{path.name}.partial-")
    staging: Path | None = None
    with ExitStack() as locks:
        try:
            staging, handle = locked_file(f".{path.name}.partial-", path.parent)
            locks.callback(os.close, os.dup(handle))  # holds the lock until the file is renamed
            with os.fdopen(handle, "wb") as file:
                yield file
            staging.chmod(0o666 & ~_umask())
            _sync(staging)
            staging.replace(path)
            _sync(path.parent)
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
