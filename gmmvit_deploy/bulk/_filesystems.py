"""Open paths and URLs through fsspec (local disks, object stores, HTTP, archives), and read the bytes of an image.

A failure to read belongs to the image (`UnreadableImage`) or to the source (InputError).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gmmvit_deploy.errors import GmmvitError, InputError
from gmmvit_deploy.extras import require
from gmmvit_deploy.inference.preprocess import MAX_IMAGE_BYTES

_WAITS_S = (0.5, 2.0)
"""Waits before the second and the third attempt to read from a file system that is not this machine's disk."""


class UnreadableImage(Exception):  # noqa: N818 - named like UnusableImage, which it stands beside
    """The image cannot be read, now or later.  The message gives the reason, for the row of the image."""


def open_filesystem(url: str, *, option: str) -> tuple[Any, str]:
    """Return (an fsspec file system, the path in it) of a local path or a URL such as ``s3://bucket/images``.

    option: the option that has the URL, for messages.
    Errors: MissingDependencyError without fsspec.
    InputError when fsspec knows no such protocol, or when the package for the protocol is not installed.
    """
    fsspec = require("fsspec", package="fsspec", extra="bulk")
    try:
        fs, path = fsspec.core.url_to_fs(url)
    except ImportError as exc:
        raise InputError(f"{option} {url}: {exc}", hint="install the package that the message names") from exc
    # fsspec raises ValueError for an unknown protocol; the file system of an archive raises errors of its format.
    except Exception as exc:
        raise InputError(
            f"{option} {url}: cannot be opened: {exc}", hint=f"type {option} with a path, or a URL that fsspec opens"
        ) from exc
    return fs, str(Path(path)) if is_local(fs) else path


@contextlib.contextmanager
def store_errors(what: str, fs: Any) -> Iterator[None]:
    """Raise InputError in place of a store's own errors in the block, but for a missing file and a file for a folder.

    what: the option and the URL, and what cannot be done, for the message.
    """
    try:
        yield
    except (GmmvitError, FileNotFoundError, NotADirectoryError):
        raise
    # Each driver of fsspec has exceptions of its own for missing keys and for a store that does not answer.
    except Exception as exc:
        hint = "" if is_local(fs) else "check the address, the network and your rights"
        if "s3" in fs.protocol:
            hint = (
                "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and AWS_ENDPOINT_URL for a store that is not Amazon's"
            )
        raise InputError(f"{what}: {type(exc).__name__}: {exc}", hint=hint) from exc


def is_local(fs: Any) -> bool:
    """Return True if the file system is the disk of this machine."""
    protocols = (fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol
    return "file" in protocols


def source_changed(path: str, expected: str, actual: str) -> InputError:
    return InputError(
        f"{path}: the source was changed after the start of the job: expected {expected}, got {actual}",
        hint="restore the source, or type --to with a new folder",
    )


def first_bytes(fs: Any, path: str, count: int) -> bytes:
    """Return the first bytes of a file; none of a file that cannot be read."""
    try:
        return _attempted(fs, path, 0, count)[:count]  # some servers send the whole file
    except (UnreadableImage, InputError):
        return b""


def read_range(fs: Any, path: str, offset: int, size: int, *, whole: bool) -> bytes:
    """Read ``size`` bytes from ``offset`` on.

    size: negative if unknown; the file is then read to its end.  whole: True if the range must be the whole file.
    Errors: `UnreadableImage` when the image is too large, or when this machine's disk or the permissions prevent
    reading; InputError when the file has another size, or when another file system fails three times.
    """
    if size > MAX_IMAGE_BYTES:
        raise UnreadableImage(f"the file has {size} bytes; the maximum is {MAX_IMAGE_BYTES} bytes")
    # A byte more than the maximum or the expected size, so that a longer file is noticed without being read.
    longest = (MAX_IMAGE_BYTES if size < 0 else size) + whole
    data = _attempted(fs, path, offset, offset + longest)
    if size < 0 and len(data) > MAX_IMAGE_BYTES:
        raise UnreadableImage(f"the file has more than {MAX_IMAGE_BYTES} bytes, the maximum")
    if 0 <= size != len(data):
        got = "more bytes" if len(data) > size else f"{len(data)} bytes"
        raise source_changed(path, f"{size} bytes", got)
    return data


def _attempted(fs: Any, path: str, start: int, end: int) -> bytes:
    if is_local(fs):
        try:
            with open(path, "rb") as file:  # noqa: PTH123 - a tenth of the time that fsspec takes for a small file
                file.seek(start)
                return file.read(end - start)
        except FileNotFoundError as exc:
            raise source_changed(path, "a file", "no file") from exc
        except OSError as exc:
            raise UnreadableImage(f"the file cannot be read: {exc.strerror or exc}") from exc
    for wait_s in (*_WAITS_S, None):
        try:
            # Every file system can read a range, but some read the whole file if the end is stated as missing.
            data: bytes = fs.cat_file(path, start=start, end=end)
            return data
        except FileNotFoundError as exc:
            raise source_changed(path, "a file", "no file") from exc
        except PermissionError as exc:
            raise UnreadableImage(f"the file cannot be read: {exc.strerror or exc}") from exc
        # Each driver of fsspec has exceptions of its own for a network that fails.
        except Exception as exc:
            if wait_s is None:
                raise InputError(
                    f"{path}: cannot be read: {type(exc).__name__}: {exc}",
                    hint="type the same command again when the source works; complete shards are kept",
                ) from exc
            time.sleep(wait_s)
    raise AssertionError("unreachable")
