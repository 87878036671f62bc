"""The files of a source, in a fixed order, and the images in them.

kind      files               images                                     id of an image
folder    image files         each file                                  path of the file
tar       .tar                members that are image files (WebDataset)  path of the archive / name of the member
parquet   .parquet            rows of the column of images               path of the file / number of the row

Other files and members are left out and counted.  Paths are relative to the source.  An image is stored in the manifest
as (id, offset, size): the place of its bytes in the file, or the number of its row.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from gmmvit_deploy.bulk._filesystems import first_bytes, is_local, open_filesystem, read_range, store_errors
from gmmvit_deploy.bulk._parquet_rows import image_column, row_count, rows
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.images.data.files import HEAD_BYTES, LeftOut, hidden_kind, is_image, left_out_text

Kind = Literal["folder", "tar", "parquet"]
UNKNOWN_SIZE = -1
_PACKED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
_BRACES = re.compile(r"\{(?:(\d+)\.\.(\d+)(?:\.\.(\d+))?|([^{}]*,[^{}]*))\}")
"""Braces as shells and WebDataset expand them."""
_PATTERN = re.compile(rf"[*?[]|{_BRACES.pattern}")
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
    column: the column of the images, for Parquet; else empty.  others: paths of the files that are left out.
    """

    url: str
    kind: Kind
    root: str
    files: tuple[SourceFile, ...]
    column: str
    fs: Any
    others: tuple[str, ...] = ()

    def path(self, relative: str) -> str:
        return f"{self.root}{relative}"

    def entries(self, left_out: LeftOut | None = None) -> Iterator[tuple[str, Entry]]:
        """Yield (file that contains the image, the image); the file is empty for images in files of their own.

        left_out: counts the files, and the members of archives, that are left out.
        Errors: InputError when an archive or a table is damaged.
        """
        left_out = LeftOut() if left_out is None else left_out
        for path in self.others:
            left_out.add(path, hidden_kind(path))
        if self.kind == "folder":
            for file in self.files:
                yield "", Entry(file.path, 0, file.size)
            return
        for file in self.files:
            if self.kind == "tar":
                for name, offset, size in _tar_members(self.fs, self.path(file.path)):
                    if offset is None:
                        left_out.add(f"{file.path}/{name}", hidden_kind(name))
                    else:
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
            path = self.path(file or entry.id)
            yield partial(read_range, self.fs, path, entry.offset, entry.size, whole=not file)


def open_source(url: str, *, column: str | None = None) -> Source:
    """List the files of a source: a folder, a file, or a pattern, as a local path or a URL that fsspec opens.

    column: the column of a Parquet file that holds the images; None if only a single column can.
    Errors: InputError when there is no image, or when the source has files of several kinds.
    """
    archives = url.split("::")
    if len(archives) > 1 and all(part.endswith(".tar") for part in archives) and not url.startswith(("tar:", "zip:")):
        raise InputError(
            f"source {url}: expected a single folder, file or pattern, got {len(archives)} archives",
            hint="type --from with a pattern in quotes, such as 'FOLDER/{train,val}-*.tar'",
        )
    fs, path = open_filesystem(url, option="--from")
    with store_errors(f"source {url}: cannot be listed", fs):
        root, listed = _listed(fs, path)
    if listed is None:
        raise InputError(f"source {url}: no such file or folder, and no file matches it as a pattern")
    listed.sort()
    files = [file for file in listed if not hidden_kind(file.path)]
    if packed := [file.path for file in files if _ends_in(file.path, _PACKED)]:
        raise InputError(
            f"source {url}: expected .tar files, got {packed[0]}: a compressed archive can be read only from its start",
            hint="decompress the archives, for example with gunzip; images are compressed already",
        )
    tars = [file for file in files if _ends_in(file.path, (".tar",))]
    tables = [file for file in files if _ends_in(file.path, (".parquet",))]
    # Beside archives and tables, only a name makes a file an image: an object store takes long to look into each file.
    look = not tars and not tables
    images = [file for file in files if is_image(file.path, _head(fs, root, file, look=look))]
    by_kind: dict[Kind, list[SourceFile]] = {"folder": images, "tar": tars, "parquet": tables}
    kinds = [kind for kind, members in by_kind.items() if members]
    if len(kinds) != 1:
        counts = ", ".join(f"{len(by_kind[kind])} of kind {kind}" for kind in kinds)
        left_out = LeftOut()
        for file in listed:
            left_out.add(file.path, hidden_kind(file.path))
        others = left_out_text(left_out.kinds())
        raise InputError(
            f"source {url}: expected files of a single kind, got {counts}"
            if kinds
            else f"source {url}: expected image files, .tar archives or .parquet files, got none; {others}",
            hint="type --from with a pattern in quotes, such as 'FOLDER/**/*.png' or 'FOLDER/*.parquet'",
        )
    (kind,) = kinds
    if column is not None and kind != "parquet":
        raise InputError(
            f"--image-column is for Parquet files; {url} has files of kind {kind}", hint="leave --image-column out"
        )
    chosen = tuple(by_kind[kind])
    column_name = image_column(fs, f"{root}{chosen[0].path}", column) if kind == "parquet" else ""
    taken = {*chosen}
    return Source(
        url=url,
        kind=kind,
        root=root,
        files=chosen,
        column=column_name,
        fs=fs,
        others=tuple(file.path for file in listed if file not in taken),
    )


def _head(fs: Any, root: str, file: SourceFile, *, look: bool) -> Callable[[], bytes]:
    if not look or not file.size:
        return lambda: b""
    return partial(first_bytes, fs, f"{root}{file.path}", HEAD_BYTES)


def _head_of_member(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    content = archive.extractfile(member)
    return content.read(HEAD_BYTES) if content else b""


def _ends_in(path: str, endings: tuple[str, ...]) -> bool:
    return path.lower().endswith(endings) and not path.rpartition("/")[2].startswith(".")


def _listed(fs: Any, path: str) -> tuple[str, list[SourceFile] | None]:
    """Return (the folder of the files, ending in a slash or empty; the files, or None if nothing is at the path)."""
    if (pattern := _PATTERN.search(path)) and not fs.exists(path):
        before = path[: pattern.start()]
        root = before[: before.rfind("/") + 1]
        matches: dict[str, Any] = {}
        for name in _expanded(path):
            found = {file: info for file, info in fs.glob(name, detail=True).items() if info["type"] != "directory"}
            if not found and name != path:
                raise InputError(f"source {path}: expected a file for each name in braces, got none for {name}")
            matches |= found
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


def _expanded(path: str) -> list[str]:
    """Return the paths that braces stand for, the innermost braces first.

    ``{000..002}`` counts with the same number of digits, ``{0..9..3}`` in steps of three, ``{a,b}`` lists.
    """
    braces = _BRACES.search(path)
    if not braces:
        return [path]
    first, last, step, listed = braces.groups()
    if listed is None:
        width = len(first) if first.startswith("0") else 0
        way = 1 if int(first) <= int(last) else -1
        numbers = range(int(first), int(last) + way, way * max(1, int(step or 1)))
        parts = [f"{number:0{width}}" for number in numbers]
    else:
        parts = listed.split(",")
    paths = (f"{path[: braces.start()]}{part}{path[braces.end() :]}" for part in parts)
    return list(dict.fromkeys(expanded for path in paths for expanded in _expanded(path)))


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


def _tar_members(fs: Any, path: str) -> Iterator[tuple[str, int | None, int]]:
    """Yield (name, offset of the first byte, size in bytes) of each file; the offset is None if it is no image."""
    seen: set[str] = set()
    try:
        with fs.open(path, "rb") as file, tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                archive.members.clear()  # type: ignore[attr-defined]  # it would keep every member in memory
                name = member.name
                if not member.isreg():
                    continue
                if hidden_kind(name) or not is_image(name, partial(_head_of_member, archive, member)):
                    yield name, None, member.size
                    continue
                if name in seen:
                    raise InputError(f"{path}: the member {name} occurs more than once, so ids would not be distinct")
                if member.issparse():
                    raise InputError(f"{path}: the member {name} is stored as a sparse file, which is not supported")
                seen.add(name)
                yield name, member.offset_data, member.size
    except (OSError, EOFError, tarfile.TarError) as exc:
        raise InputError(f"{path}: expected a tar archive: {exc}", hint="download or write the archive again") from exc
