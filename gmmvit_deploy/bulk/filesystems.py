"""Open paths and URLs through fsspec: local disks, object stores, HTTP, archives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.extras import require

__all__ = ["is_local", "open_filesystem"]


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


def is_local(fs: Any) -> bool:
    """Return True if the file system is the disk of this machine."""
    protocols = (fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol
    return "file" in protocols
