"""The files of a source, in a fixed order, and the images in them.

kind      files               images                                     id of an image
folder    image files         each file                                  path of the file
tar       .tar                members that are image files (WebDataset)  path of the archive / name of the member
parquet   .parquet            rows of the column of images               path of the file / number of the row

Paths are relative to the source.  An image is stored in the manifest as (id, offset, size): the place of its bytes in
the file, or the number of its row.
"""

from __future__ import annotations

import glob
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from gmmvit_deploy.bulk._filesystems import is_local, open_filesystem, read_range
from gmmvit_deploy.bulk._parquet_rows import image_column, row_count, rows
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.images.data.files import SUFFIXES

__all__ = ["UNKNOWN_SIZE", "Entry", "Kind", "Source", "SourceFile", "open_source"]

Kind = Literal["folder", "tar", "parquet"]
UNKNOWN_SIZE = -1
_SUFFIXES: dict[Kind, tuple[str, ...]] = {"folder": SUFFIXES, "tar": (".tar",), "parquet": (".parquet",)}
_PACKED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
_MARKS = ("ETag", "etag", "md5Hash", "CRC", "mtime", "LastModified", "last_modified", "updated", "date_time", "created")
"""Keys of fsspec's description of a file that change when the file changes, the most exact first."""


class SourceFile(NamedTuple):
    """A file of a source.

    path: relative to the source.  size: in bytes, or `UNKNOWN_SIZE`.  mark: changes when the file changes; empty on
    file systems that state no time and no hash.
    """

    path: str
    size: int
    mark: str


class Entry(NamedTuple):
    """An image of the manifest.  offset: of its first byte in the file, or the number of its row.  size: in bytes."""

    id: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """An opened source.

    url: as the user typed it.  root: the folder that all paths are relative to.
    column: the column of the images, for Parquet; else empty.
    """

    url: str
    kind: Kind
    root: str
    files: tuple[SourceFile, ...]
    column: str
    fs: Any

    def path(self, relative: str) -> str:
        return f"{self.root}{relative}"

    def entries(self) -> Iterator[tuple[str, Entry]]:
        """Yield (file that contains the image, the image); the file is empty for images in files of their own.

        Errors: InputError when an archive or a table is damaged.
        """
        if self.kind == "folder":
            for file in self.files:
                yield "", Entry(file.path, 0, file.size)
            return
        for file in self.files:
            if self.kind == "tar":
                for name, offset, size in _tar_members(self.fs, self.path(file.path)):
                    yield file.path, Entry(f"{file.path}/{name}", offset, size)
            else:
                for row in range(row_count(self.fs, self.path(file.path))):
                    yield file.path, Entry(f"{file.path}/{row}", row, UNKNOWN_SIZE)

    def contents(self, file: str, entries: list[Entry]) -> Iterator[Callable[[], bytes]]:
        """Yield for each image a function that returns its bytes, and that several threads may call.

        file: the file that contains the images; empty for images in files of their own.
        The functions raise `UnreadableImage` for an image whose row must state an error, and InputError when the
        source has changed or cannot be read.
        """
        if self.kind == "parquet":
            yield from rows(self.fs, self.path(file), self.column, entries[0].offset, len(entries))
            return
        for entry in entries:
            yield read_range(self.fs, self.path(file or entry.id), entry.offset, entry.size, whole=not file)


def open_source(url: str, *, column: str | None = None) -> Source:
    """List the files of a source: a folder, a file, or a pattern, as a local path or a URL that fsspec opens.

    column: the column of a Parquet file that holds the images; None if only a single column can.
    Errors: InputError when there is no image, or when the source has files of several kinds.
    """
    fs, path = open_filesystem(url, option="--from")
    try:
        root, listed = _listed(fs, path)
    except OSError as exc:
        raise InputError(f"--from {url}: cannot be listed: {exc}") from exc
    if listed is None:
        raise InputError(f"--from {url}: no such file or folder, and no file matches it as a pattern")
    files = sorted(listed)
    by_kind = {kind: [file for file in files if _has_suffix(file.path, ends)] for kind, ends in _SUFFIXES.items()}
    kinds = [kind for kind, members in by_kind.items() if members]
    if packed := [file.path for file in files if _has_suffix(file.path, _PACKED)]:
        raise InputError(
            f"--from {url}: expected .tar files, got {packed[0]}: a compressed archive can be read only from its start",
            hint="decompress the archives, for example with gunzip; images are compressed already",
        )
    if len(kinds) != 1:
        counts = ", ".join(f"{len(by_kind[kind])} of kind {kind}" for kind in kinds)
        every = ", ".join(ending for ends in _SUFFIXES.values() for ending in ends)
        raise InputError(
            f"--from {url}: expected files of a single kind, got {counts}"
            if kinds
            else f"--from {url}: expected image files, tar archives or Parquet files ({every}), got none of them",
            hint="type --from with a pattern in quotes, such as 'FOLDER/**/*.png' or 'FOLDER/*.parquet'",
        )
    (kind,) = kinds
    if column is not None and kind != "parquet":
        raise InputError(
            f"--image-column is for Parquet files; {url} has files of kind {kind}", hint="leave --image-column out"
        )
    chosen = tuple(by_kind[kind])
    column_name = image_column(fs, f"{root}{chosen[0].path}", column) if kind == "parquet" else ""
    return Source(url=url, kind=kind, root=root, files=chosen, column=column_name, fs=fs)


def _has_suffix(path: str, suffixes: tuple[str, ...]) -> bool:
    return path.lower().endswith(suffixes)


def _listed(fs: Any, path: str) -> tuple[str, list[SourceFile] | None]:
    """Return (the folder of the files, ending in a slash or empty; the files, or None if nothing is at the path)."""
    if glob.has_magic(path) and not fs.exists(path):
        matches = {name: info for name, info in fs.glob(path, detail=True).items() if info["type"] != "directory"}
        before = path[: glob.magic_check.search(path).start()]  # type: ignore[attr-defined]
        root = before[: before.rfind("/") + 1]
        return root, _files(fs, root, matches) or None
    if fs.isdir(path):
        root = "" if path in ("", "/") and not is_local(fs) else f"{path.rstrip('/')}/"
        files: list[SourceFile] = []
        for _, _, infos in fs.walk(path, detail=True):
            files += _files(fs, root, {info["name"]: info for info in infos.values()})
        return root, files
    if fs.exists(path):
        root = path[: path.rfind("/") + 1]
        return root, _files(fs, root, {path: fs.info(path)})
    return "", None


def _files(fs: Any, root: str, infos: dict[str, Any]) -> list[SourceFile]:
    local = is_local(fs)
    files = []
    for name, info in infos.items():
        # On a disk, "other" is a link, which may lead to an image, or a pipe, which would never end.
        if info["type"] == "file" or (local and Path(name).is_file()):
            size = info.get("size")
            mark = next((str(info[key]) for key in _MARKS if info.get(key) is not None), "")
            files.append(SourceFile(name.removeprefix(root), UNKNOWN_SIZE if size is None else int(size), mark))
    return files


def _tar_members(fs: Any, path: str) -> Iterator[tuple[str, int, int]]:
    """Yield (name, offset of the first byte, size in bytes) of each image in a tar archive, in its order.

    Errors: InputError when the archive is damaged, or when two images have the same name.
    """
    seen: set[str] = set()
    try:
        with fs.open(path, "rb") as file, tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                archive.members.clear()  # type: ignore[attr-defined]  # it would keep every member in memory
                name = member.name
                if not member.isreg() or not name.lower().endswith(SUFFIXES):
                    continue
                if name in seen:
                    raise InputError(f"{path}: the member {name} occurs more than once, so ids would not be distinct")
                if member.issparse():
                    raise InputError(f"{path}: the member {name} is stored as a sparse file, which is not supported")
                seen.add(name)
                yield name, member.offset_data, member.size
    except (OSError, EOFError, tarfile.TarError) as exc:
        raise InputError(f"{path}: expected a tar archive: {exc}", hint="download or write the archive again") from exc
