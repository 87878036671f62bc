"""The folder of a job: complete files only, and claims on shards.

On a local disk, a file is written under another name, synced and renamed. On any other file system, fsspec's
transaction makes the file appear when it is complete.

A process claims a shard by a lock on a byte of the file ``_job/claims``: byte 0 for the plan, byte n + 1 for shard n.
Linux releases the locks of a process that ends for any reason. On object stores, and on disks without locks, nothing
is claimed; two processes may then compute the same shard, and the last of them replaces the file by the same bytes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from gmmvit_deploy.bulk._filesystems import is_local, open_filesystem, store_errors
from gmmvit_deploy.errors import GmmvitError, OutputError
from gmmvit_deploy.files.leftovers import remove_unlocked
from gmmvit_deploy.files.writing import new_file

JOB_FOLDER = "_job"
"""Readers of Parquet folders leave out names that begin with an underscore."""
_CLAIMS = "claims"
_PLAN = -1
"""The number that stands for the plan among those of the shards."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_HELD = (errno.EACCES, errno.EAGAIN)
_BETWEEN_TRIES_S = 0.2


class Storage:
    """The folder of a job, on a local disk or anywhere that fsspec opens."""

    def __init__(self, url: str) -> None:
        """Open the folder, which need not exist.  Errors: as `open_filesystem`."""
        self.url = url
        self._fs, self.root = open_filesystem(url, option="--to")
        self.local = is_local(self._fs)

    def prepare(self) -> None:
        """Make the folder, and remove the partly written files of killed processes.

        Errors: OutputError when the folder cannot be made; InputError when a store cannot be reached.
        """
        if self.local:
            try:
                Path(self.path(JOB_FOLDER)).mkdir(parents=True, exist_ok=True)
            except OSError as exc:
                raise OutputError(
                    f"{self.url}: the folder cannot be made: {exc.strerror or exc}",
                    hint="type --to with another folder",
                ) from exc
        else:
            with store_errors(f"--to {self.url}: the folder cannot be made", self._fs):
                self._fs.makedirs(self.path(JOB_FOLDER), exist_ok=True)
        self.remove_leftovers()

    def remove_leftovers(self) -> None:
        """Remove the partly written files of processes that have ended."""
        if self.local:
            for prefix in (".shard-", "._report"):  # the folder can be that of a user, with other hidden files
                remove_unlocked(Path(self.root), prefix)
            remove_unlocked(Path(self.path(JOB_FOLDER)), ".")

    def path(self, name: str) -> str:
        return f"{self.root.rstrip('/')}/{name}"

    def names(self, folder: str = "") -> set[str]:
        """Return the names of the files and folders in the folder, or in one below it; empty if it does not exist."""
        self._fs.invalidate_cache()  # another process may have written files
        try:
            with store_errors(f"--to {self.url}: cannot be listed", self._fs):
                return {entry.rstrip("/").rpartition("/")[2] for entry in self._fs.ls(self.path(folder), detail=False)}
        except FileNotFoundError:
            return set()
        except NotADirectoryError as exc:
            raise OutputError(f"{self.url}: expected a folder, got a file", hint="type --to FOLDER") from exc

    def exists(self, name: str) -> bool:
        if self.local:
            return Path(self.path(name)).exists()
        self._fs.invalidate_cache()
        return bool(self._fs.exists(self.path(name)))

    def remove(self, name: str) -> None:
        """Remove a file, unless another process has removed it."""
        with contextlib.suppress(OSError):
            self._fs.rm_file(self.path(name))

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        """Return the bytes of a file from ``start`` up to ``end``.  Errors: OSError."""
        return bytes(self._fs.cat_file(self.path(name), start=start, end=end))

    def open(self, name: str) -> Any:
        """Open a file to read, as a context manager.  Errors: OSError."""
        return self._fs.open(self.path(name), "rb")

    @contextlib.contextmanager
    def written(self, name: str) -> Iterator[IO[bytes]]:
        """Yield a file to write; it appears under its name, and replaces an earlier file, if the block succeeds.

        Errors: OutputError when writing fails.
        """
        if self.local:
            with new_file(Path(self.path(name)), force=True) as file:
                yield file
            return
        try:
            with self._fs.transaction, self._fs.open(self.path(name), "wb") as remote:
                yield remote
        except GmmvitError:
            raise
        except OSError as exc:
            raise OutputError(
                f"{self.url}/{name}: cannot be written: {exc}; no partial output remains",
                hint="type the same command again when the storage works",
            ) from exc


class Claims:
    """The locks of this process on shards.  A process opens the claims of a job once.

    Closing any descriptor of the file would release every lock of the process on it, so it stays open until `close`.
    """

    def __init__(self, storage: Storage) -> None:
        self._descriptor: int | None = None
        if storage.local:
            with contextlib.suppress(OSError):  # a folder that this process may only read: nothing to claim
                self._descriptor = os.open(storage.path(f"{JOB_FOLDER}/{_CLAIMS}"), os.O_RDWR | os.O_CREAT, 0o666)

    def take(self, number: int) -> bool:
        """Claim shard ``number``.  Return False if another process holds the claim."""
        if self._descriptor is None:
            return True
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number + 1)
        except OSError as exc:
            if exc.errno in _HELD:
                return False
            if exc.errno not in _NO_LOCKS:
                raise
        return True

    def release(self, number: int) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, number + 1)

    @contextlib.contextmanager
    def plan(self) -> Iterator[None]:
        """Hold the claim on the plan during the block; wait for the process that holds it."""
        while not self.take(_PLAN):
            time.sleep(_BETWEEN_TRIES_S)
        try:
            yield
        finally:
            self.release(_PLAN)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
