"""List the images in a tar archive, such as a shard of WebDataset."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from typing import Any

from gmmvit_deploy.errors import InputError

__all__ = ["tar_members"]


def tar_members(fs: Any, path: str, suffixes: tuple[str, ...]) -> Iterator[tuple[str, int, int]]:
    """Yield (name, offset of the first byte, size in bytes) of each image, in the order of the archive.

    Errors: InputError when the archive is damaged, or when two images have the same name.
    """
    seen: set[str] = set()
    try:
        with fs.open(path, "rb") as file, tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                archive.members.clear()  # type: ignore[attr-defined]  # it would keep every member in memory
                name = member.name
                if not member.isreg() or not name.lower().endswith(suffixes):
                    continue
                if name in seen:
                    raise InputError(f"{path}: the member {name} occurs more than once, so ids would not be distinct")
                if member.issparse():
                    raise InputError(f"{path}: the member {name} is stored as a sparse file, which is not supported")
                seen.add(name)
                yield name, member.offset_data, member.size
    except (OSError, EOFError, tarfile.TarError) as exc:
        raise InputError(f"{path}: expected a tar archive: {exc}", hint="download or write the archive again") from exc
