"""The images of folders, archives and tables, on disks and on other file systems."""

from __future__ import annotations

import base64
import functools
import gzip
import http.server
import importlib
import os
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import fsspec
import pyarrow as pa
import pytest

from gmmvit_deploy.bulk._filesystems import UnreadableImage
from gmmvit_deploy.bulk._storage import Storage
from gmmvit_deploy.bulk.source import Entry, Source, open_source
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.images.data.files import LeftOut
from tests.bulk.sources import MIXED, OTHERS, images, png, write_folder, write_members, write_parquet, write_tar

FILES = images(20)
PAIR = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def contents(source: Source) -> dict[str, bytes]:
    """Return id → bytes of every image, read in pieces of three as shards do."""
    by_file: dict[str, list[Entry]] = {}
    for file, entry in source.entries():
        by_file.setdefault(file, []).append(entry)
    read: dict[str, bytes] = {}
    for file, entries in by_file.items():
        for start in range(0, len(entries), 3):
            part = entries[start : start + 3]
            for entry, content in zip(part, source.contents(file, part), strict=True):
                assert entry.id not in read
                read[entry.id] = content()
    return read


def write_as(kind: str, folder: Path, files: dict[str, bytes]) -> None:
    if kind == "folder":
        write_folder(folder, files)
    else:
        write_members(folder / "x.tar", files)


@pytest.mark.parametrize("kind", ["folder", "tar"])
def test_images_are_known_by_their_first_bytes(kind: str, tmp_path: Path) -> None:
    files = {f"x/{name}": data for name, data in {**MIXED, **OTHERS}.items()}
    write_as(kind, tmp_path, files)
    source, left_out = open_source(str(tmp_path)), LeftOut()
    prefix = "" if kind == "folder" else "x.tar/"
    assert {entry.id for _, entry in source.entries(left_out)} == {f"{prefix}x/{name}" for name in MIXED}
    assert [(kind.kind, kind.files, kind.first) for kind in left_out.kinds()] == [
        (".txt", 2, f"{prefix}x/a.txt"),
        ("without a suffix", 2, f"{prefix}x/.DS_Store"),
        ("._*", 1, f"{prefix}x/._a.PNG"),
        (".db", 1, f"{prefix}x/Thumbs.db"),
    ]


@pytest.mark.parametrize("kind", ["folder", "tar"])
def test_images_in_hidden_folders_are_left_out(kind: str, tmp_path: Path) -> None:
    files = {"./a/.thumbnails/x.png": png(1), "__MACOSX/x.png": png(2), "./a/x.png": png(3), ".x.png": png(4)}
    write_as(kind, tmp_path / ".data", files)
    source, left_out = open_source(str(tmp_path / ".data")), LeftOut()
    assert {entry.id.rpartition("./")[2].removeprefix("x.tar/") for _, entry in source.entries(left_out)} == {
        "a/x.png",
        ".x.png",
    }
    assert [(kind.kind, kind.files) for kind in left_out.kinds()] == [("in hidden folders", 2)]


def test_file_and_pattern(tmp_path: Path) -> None:
    write_folder(tmp_path, FILES)
    assert list(contents(open_source(str(tmp_path / "0" / "0004.png")))) == ["0004.png"]
    read = contents(open_source(str(tmp_path / "*" / "000[0-3].png")))
    assert list(read) == ["0/0000.png", "0/0002.png", "1/0001.png", "1/0003.png"]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("train-{000..002}.tar", ["train-000.tar", "train-001.tar", "train-002.tar"]),
        ("{train,val}-{001..002}.tar", ["train-001.tar", "train-002.tar", "val-001.tar", "val-002.tar"]),
        ("{val-001,train-{000,001}}.tar", ["train-000.tar", "train-001.tar", "val-001.tar"]),
    ],
)
def test_braces_of_webdataset(pattern: str, names: list[str], tmp_path: Path) -> None:
    for name in ("train-000", "train-001", "train-002", "train-010", "val-001", "val-002"):
        write_tar(tmp_path / f"{name}.tar", {"x.png": png(1)})
    assert [file.path for file in open_source(str(tmp_path / pattern)).files] == names
    (tmp_path / names[1]).unlink()
    with pytest.raises(InputError, match=f"expected a file for each name in braces, got none for .*{names[1][-7:]}"):
        open_source(str(tmp_path / pattern))


def test_archives_of_webdataset(tmp_path: Path) -> None:
    write_tar(tmp_path / "a" / "000.tar", dict([*FILES.items()][:9]))
    write_tar(tmp_path / "a" / "001.tar", dict([*FILES.items()][9:]))
    read = contents(open_source(str(tmp_path)))
    assert [*read.values()] == [*FILES.values()]
    assert list(read)[:2] == ["a/000.tar/0/0000.png", "a/000.tar/1/0001.png"]
    assert list(read)[9] == "a/001.tar/1/0009.png"


@pytest.mark.parametrize(
    "kind", [pa.binary(), pa.large_binary(), pa.binary_view(), pa.dictionary(pa.int32(), pa.binary()), PAIR], ids=str
)
def test_tables_of_bytes(kind: pa.DataType, tmp_path: Path) -> None:
    column: list[object] = [*FILES.values()]
    if kind == PAIR:
        column = [{"bytes": data, "path": None} for data in FILES.values()]
    write_parquet(tmp_path / "p.parquet", column, kind)
    read = contents(open_source(str(tmp_path)))
    assert read == {f"p.parquet/{row}": data for row, data in enumerate(FILES.values())}


def test_tables_of_paths(tmp_path: Path) -> None:
    write_folder(tmp_path / "t", FILES)
    names: list[object] = [*FILES]
    names[1], names[2] = str(tmp_path / "t" / names[1]), f"file://{tmp_path}/t/{names[2]}"
    write_parquet(tmp_path / "t" / "p.parquet", names, pa.string())
    read = contents(open_source(str(tmp_path / "t" / "p.parquet"), column="image"))
    assert [*read.values()] == [*FILES.values()]
    write_parquet(tmp_path / "u" / "p.parquet", [{"bytes": None, "path": f"../t/{name}"} for name in FILES], PAIR)
    assert [*contents(open_source(str(tmp_path / "u"))).values()] == [*FILES.values()]


@pytest.mark.parametrize("kind", [pa.string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())], ids=str)
def test_tables_of_base64(kind: pa.DataType, tmp_path: Path) -> None:
    data = [*MIXED.values()][:6]
    column: list[object] = [base64.b64encode(part).decode() for part in data]
    column[1] = f"data:image/gif;base64,{column[1]}"
    column[2] = base64.encodebytes(data[2]).decode()
    column[3] = base64.urlsafe_b64encode(data[3]).decode().rstrip("=")
    data.append(MIXED["h.ppm"])
    column.append(base64.b64encode(data[-1]).decode())
    column.append("A" * 300)
    write_parquet(tmp_path / "p.parquet", column, kind)
    source = open_source(str(tmp_path), column="image")
    *read, last = source.contents("p.parquet", [entry for _, entry in source.entries()])
    assert [content() for content in read] == data
    with pytest.raises(UnreadableImage, match="expected a path or an image in base64, got 300 characters: AAA"):
        last()


def test_rows_without_an_image_are_unreadable(tmp_path: Path) -> None:
    column = [{"bytes": None, "path": "nowhere.png"}, {"bytes": None, "path": None}, None]
    source = open_source(str(write_parquet(tmp_path / "p.parquet", column, PAIR)))
    entries = [entry for _, entry in source.entries()]
    for content, why in zip(
        source.contents("p.parquet", entries), ("no file nowhere.png", "no image", "no image"), strict=True
    ):
        with pytest.raises(UnreadableImage, match=why):
            content()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder, and its URL on an HTTP server that lists it."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Print nothing."""

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield folder, f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def test_images_over_http(served: tuple[Path, str]) -> None:
    folder, url = served
    files = {**FILES, "no_suffix": png(78)}
    write_folder(folder, {**files, "notes.txt": b"no image", "empty.txt": b""})
    assert contents(open_source(url)) == files


def test_archive_in_memory_and_images_in_a_zip(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", FILES)
    place = f"memory://{uuid4()}"
    with fsspec.open(f"{place}/a.tar", "wb") as file:
        file.write((tmp_path / "a.tar").read_bytes())
    assert [*contents(open_source(place)).values()] == [*FILES.values()]
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as packed:
        for name, data in FILES.items():
            packed.writestr(name, data)
    assert contents(open_source(f"zip://::{tmp_path}/a.zip")) == {name: FILES[name] for name in sorted(FILES)}


def test_a_store_that_cannot_be_reached_or_has_no_keys_is_named_with_what_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """s3fs raises errors of its own classes; without an account, only a file system that raises them is here."""

    class Store(fsspec.get_filesystem_class("memory")):  # type: ignore[misc]
        protocol = ("s3", "s3a")

        def ls(self, *_: object, **__: object) -> None:
            raise RuntimeError("Unable to locate credentials")

        isdir = makedirs = ls

    monkeypatch.setitem(importlib.import_module("fsspec.registry")._registry, "s3", Store)
    for call, what in (
        (lambda: open_source("s3://b/x"), "source s3://b/x: cannot be listed"),
        (lambda: Storage("s3://b/y").names(), "--to s3://b/y: cannot be listed"),
        (lambda: Storage("s3://b/y").prepare(), "--to s3://b/y: the folder cannot be made"),
    ):
        with pytest.raises(InputError, match=f"^{what}: RuntimeError: Unable to locate credentials\n") as error:
            call()
        assert "AWS_ACCESS_KEY_ID" in str(error.value.hint)


def test_a_changed_file_is_noticed_when_it_is_read(tmp_path: Path) -> None:
    write_folder(tmp_path, FILES)
    source = open_source(str(tmp_path))
    entries = [entry for _, entry in source.entries()][:3]
    (tmp_path / entries[0].id).write_bytes(b"x" * (entries[0].size + 1))
    (tmp_path / entries[1].id).write_bytes(b"x")
    (tmp_path / entries[2].id).unlink()
    for content, got in zip(source.contents("", entries), ("more bytes", "1 bytes", "no file"), strict=True):
        with pytest.raises(InputError, match=f"the source was changed .* got {got}"):
            content()


def test_a_file_that_is_too_large_or_may_not_be_read_is_unreadable(tmp_path: Path) -> None:
    (tmp_path / "large.png").touch()
    os.truncate(tmp_path / "large.png", 33 * 2**20)
    (tmp_path / "loop.png").mkdir()
    (tmp_path / "pipe.jpg").symlink_to(tmp_path / "loop.png")
    os.mkfifo(tmp_path / "pipe.png")
    source = open_source(str(tmp_path))
    entries = [entry for _, entry in source.entries()]
    assert [entry.id for entry in entries] == ["large.png"]
    with pytest.raises(UnreadableImage, match="the maximum is 33554432 bytes"):
        next(source.contents("", entries))()


def refusals(folder: Path) -> dict[str, str]:
    """Return source → expected message."""
    write_folder(folder / "mixed", {"a.png": png(1)})
    write_tar(folder / "mixed" / "a.tar", FILES)
    packed = write_tar(folder / "packed" / "a.tar", FILES)
    (folder / "packed" / "a.tar.gz").write_bytes(gzip.compress(packed.read_bytes()))
    write_folder(folder / "empty", {"a.txt": b""})
    write_folder(folder / "damaged", {"a.tar": packed.read_bytes()[: packed.stat().st_size // 2 - 700]})
    write_folder(folder / "text", {"a.parquet": b"text"})
    write_tar(folder / "twice" / "a.tar", {"x.png": png(1)})
    write_tar(folder / "twice" / "a.tar", {"x.png": png(2)}, mode="a")
    write_parquet(folder / "labels" / "a.parquet", ["x"], pa.string())
    return {
        "mixed": "single kind, got 1 of kind folder, 1 of kind tar",
        "packed": "a.tar.gz: a compressed archive",
        "empty": r"expected image files, .* got none; 1 file was left out: 1 \.txt \(a\.txt\)",
        "nowhere": "no such file or folder",
        "damaged": "a.tar: expected a tar archive",
        "text": "a.parquet: expected a Parquet file",
        "twice": "x.png occurs more than once",
        "labels": r"exactly one column of image bytes, got the columns image \(string\)",
        "ftp9://x": "ftp9",
        "twice/a.tar::packed/a.tar": "expected a single folder, file or .*, got 2 archives",
    }


def test_refused_sources_are_named(tmp_path: Path) -> None:
    for source, message in refusals(tmp_path).items():
        with pytest.raises(InputError, match=message):
            list(open_source(source if "://" in source else str(tmp_path / source)).entries())
    with pytest.raises(InputError, match="expected a column 'none' of image bytes or paths"):
        open_source(str(tmp_path / "labels"), column="none")
    with pytest.raises(InputError, match="--image-column is for Parquet"):
        open_source(str(tmp_path / "twice"), column="image")
