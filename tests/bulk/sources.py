"""Sources and plans for the tests of classification in bulk: the same images in folders, archives and tables."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
from PIL import Image

from gmmvit_deploy.bulk._plan import Plan, Settings, settled_plan
from gmmvit_deploy.bulk._storage import Claims, Storage
from gmmvit_deploy.bulk.source import Source


def encoded(seed: int, file_format: str, side: int = 20) -> bytes:
    """Return an image of noise, which differs for each seed."""
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, file_format)
    return file.getvalue()


def png(seed: int, side: int = 20) -> bytes:
    return encoded(seed, "PNG", side)


MIXED = {
    "a.PNG": png(1),
    "b.gif": encoded(2, "GIF"),
    "c.tif": encoded(3, "TIFF"),
    "d.jfif": encoded(4, "JPEG"),
    "e.jpe": encoded(5, "JPEG"),
    "f": encoded(6, "JPEG"),
    "g.dat": encoded(7, "WEBP"),
    "h.ppm": encoded(8, "PPM"),
    "h": encoded(8, "PPM"),
    "h.tga": encoded(8, "TGA"),
    ".i": encoded(9, "BMP"),
    "j.jpg": b"",
    "k": b"\0\0\0\x18ftypheic",
}
"""Images by their names or by their first bytes: an empty file called .jpg and a HEIF file need an answer, too."""
OTHERS = {
    "._a.PNG": b"\0\5\x16\7\0\2\0\0Mac OS X        ",
    ".DS_Store": b"\0\0\0\1Bud1",
    "Thumbs.db": b"\xd0\xcf\x11\xe0",
    "a.txt": b"BMW and other cars",
    "b.txt": b"",
    "LICENSE": b"P5",
}
"""Files that are not images."""


def images(count: int, *, broken: int | None = None) -> dict[str, bytes]:
    """Return name → bytes of images in two folders; the image number ``broken`` is none."""
    return {f"{n % 2}/{n:04}.png": b"no image" if n == broken else png(n) for n in range(count)}


def write_folder(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def write_members(path: Path, files: dict[str, bytes], *, mode: str = "w") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def write_tar(path: Path, files: dict[str, bytes], *, mode: str = "w") -> Path:
    """Write images with their classes, as WebDataset does: a sample has several members."""
    members = {
        member: part for name, data in files.items() for member, part in ((name, data), (f"{name[:-4]}.cls", b"3"))
    }
    return write_members(path, members, mode=mode)


def write_parquet(path: Path, column: list[object], kind: pa.DataType, *, group: int = 7) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"image": pa.array(column, kind), "label": [f"class {n}" for n in range(len(column))]})
    parquet.write_table(table, path, row_group_size=group)
    return path


def settled(source: Source, folder: str, settings: Settings) -> tuple[Plan, Storage]:
    """Return the plan of a job's folder, new or existing, and the folder."""
    storage = Storage(folder)
    storage.prepare()
    claims = Claims(storage)
    try:
        return settled_plan(storage, claims, source, settings), storage
    finally:
        claims.close()
