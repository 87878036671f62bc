"""Sources for the tests of classification in bulk: the same images in folders, archives and tables."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
from PIL import Image

__all__ = ["images", "png", "write_folder", "write_parquet", "write_tar"]


def png(seed: int, side: int = 20) -> bytes:
    """Return a PNG of noise, which differs for each seed."""
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def images(count: int, *, broken: int | None = None) -> dict[str, bytes]:
    """Return name → bytes of images in two folders; the image number ``broken`` is none."""
    return {f"{n % 2}/{n:04}.png": b"no image" if n == broken else png(n) for n in range(count)}


def write_folder(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def write_tar(path: Path, files: dict[str, bytes], *, mode: str = "w") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as archive:
        for name, data in files.items():
            for member, content in ((name, data), (f"{name[:-4]}.cls", b"3")):  # WebDataset: the parts of a sample
                info = tarfile.TarInfo(member)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return path


def write_parquet(path: Path, column: list[object], kind: pa.DataType, *, group: int = 7) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"image": pa.array(column, kind), "label": [f"class {n}" for n in range(len(column))]})
    parquet.write_table(table, path, row_group_size=group)
    return path
