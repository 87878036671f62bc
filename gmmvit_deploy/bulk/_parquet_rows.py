"""Read images from Parquet files: bytes, base64, paths, or the pairs of bytes and paths of Hugging Face datasets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from gmmvit_deploy.bulk._filesystems import UnreadableImage, open_filesystem, read_range
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.extras import require
from gmmvit_deploy.images.data.files import HEAD
from gmmvit_deploy.inference.preprocess import bytes_from_base64

_ROWS_AT_ONCE = 16
"""Rows that are read at once: all their images are in memory together."""
_LONGEST_PATH, _LONGEST_NAME = 4096, 255
_BUFFER_BYTES = 1 << 20
_DAMAGED = "download or write the file again"


@contextmanager
def _opened(fs: Any, path: str) -> Iterator[Any]:
    parquet = require("pyarrow.parquet", package="pyarrow", extra="bulk")
    arrow = require("pyarrow", package="pyarrow", extra="bulk")
    try:
        with fs.open(path, "rb") as file:
            # Without these two, pyarrow would load the images of a whole row group.
            yield parquet.ParquetFile(file, buffer_size=_BUFFER_BYTES, pre_buffer=False)
    except (OSError, arrow.ArrowException) as exc:
        raise InputError(f"{path}: expected a Parquet file: {exc}", hint=_DAMAGED) from exc


def row_count(fs: Any, path: str) -> int:
    """Return the number of rows.  Errors: InputError when the file is damaged."""
    with _opened(fs, path) as file:
        return int(file.metadata.num_rows)


def image_column(fs: Any, path: str, named: str | None) -> str:
    """Return the name of the column of images.

    named: the column that the user named; None chooses the only column of bytes.
    Errors: InputError when the column is missing or has another type, or when none is named and the file does not have
    exactly one column of bytes.
    """
    with _opened(fs, path) as file:
        schema = file.schema_arrow
    by_bytes = [field.name for field in schema if _holds_bytes(field.type)]
    possible = [*by_bytes, *(field.name for field in schema if _holds_paths(field.type))]
    names = ", ".join(f"{field.name} ({field.type})" for field in schema)
    if named is not None:
        if named not in possible:
            raise InputError(
                f"{path}: expected a column {named!r} of image bytes or paths, got the columns {names}",
                hint="type --image-column with the name of such a column",
            )
        return named
    if len(by_bytes) != 1:
        raise InputError(
            f"{path}: expected exactly one column of image bytes, got the columns {names}",
            hint="type --image-column NAME with the column of the image bytes or paths",
        )
    return str(by_bytes[0])


def rows(fs: Any, path: str, column: str, first: int, count: int) -> Iterator[Callable[[], bytes]]:
    """Yield for each of the rows first … first + count - 1 a function that returns the bytes of its image.

    Paths are relative to the folder of the Parquet file; absolute paths and URLs are opened as they are.
    The functions raise `UnreadableImage` for a row without an image.
    Errors: InputError when the file is damaged, or has fewer rows.
    """
    with _opened(fs, path) as file:
        if column not in file.schema_arrow.names:
            raise InputError(f"{path}: expected a column {column!r}, got {', '.join(file.schema_arrow.names)}")
        groups, skipped = _groups(file.metadata, first, count)
        remaining = count
        for batch in file.iter_batches(_ROWS_AT_ONCE, row_groups=groups, columns=[column], use_threads=False):
            values = batch.column(0)
            start, skipped = min(skipped, len(values)), max(0, skipped - len(values))
            for value in values.slice(start, remaining):
                remaining -= 1
                yield _content(fs, path, value.as_py())
            if not remaining:
                return
        raise InputError(f"{path}: expected at least {first + count} rows, got {file.metadata.num_rows}")


def _groups(metadata: Any, first: int, count: int) -> tuple[list[int], int]:
    """Return (the row groups that hold the rows, the number of rows in them before the first)."""
    groups: list[int] = []
    start = before = 0
    for group in range(metadata.num_row_groups):
        end = start + metadata.row_group(group).num_rows
        if start < first + count and end > first:
            before = before if groups else first - start
            groups.append(group)
        start = end
    return groups, before


def _content(fs: Any, path: str, value: Any) -> Callable[[], bytes]:
    if isinstance(value, dict):  # Hugging Face datasets: the bytes, or the path of a file
        value = value.get("bytes") if value.get("bytes") is not None else value.get("path")
    if isinstance(value, bytes):
        return lambda: value
    if not isinstance(value, str):
        return _no_image
    encoded = bytes_from_base64(value.encode("utf-8", "replace"))
    if encoded is not None and HEAD.match(encoded):
        return lambda: encoded
    if "://" in value:
        other, there = open_filesystem(value, option="the image")
        return partial(read_range, other, there, 0, -1, whole=True)
    located = value if value.startswith("/") else f"{path[: path.rfind('/') + 1]}{value}"
    return partial(_linked, fs, located, value)


def _no_image() -> bytes:
    raise UnreadableImage("the row has no image")


def _linked(fs: Any, path: str, value: str) -> bytes:
    """Read the file of a path.  A missing file is an error of its row: the table is unchanged, and still names it."""
    if len(value) > _LONGEST_PATH or any(len(part.encode()) > _LONGEST_NAME for part in value.split("/")):
        raise UnreadableImage(f"expected a path or an image in base64, got {len(value):,} characters: {value[:40]}…")
    try:
        return read_range(fs, path, 0, -1, whole=True)
    except InputError as exc:
        if isinstance(exc.__cause__, FileNotFoundError):
            raise UnreadableImage(f"there is no file {value}") from exc
        raise


def _holds_bytes(kind: Any) -> bool:
    import pyarrow

    types = pyarrow.types
    if types.is_dictionary(kind):
        return _holds_bytes(kind.value_type)
    if types.is_struct(kind):
        return any(kind.field(index).name == "bytes" for index in range(kind.num_fields))
    checks = (types.is_binary, types.is_large_binary, types.is_fixed_size_binary, types.is_binary_view)
    return any(check(kind) for check in checks)


def _holds_paths(kind: Any) -> bool:
    import pyarrow

    types = pyarrow.types
    if types.is_dictionary(kind):
        return _holds_paths(kind.value_type)
    return any(check(kind) for check in (types.is_string, types.is_large_string, types.is_string_view))
