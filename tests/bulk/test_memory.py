"""The memory of a run does not grow with the size of its shards."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pyarrow as pa
import pytest

from gmmvit_deploy.bundle.artifacts import Bundle
from tests.bulk.sources import png, write_folder, write_parquet, write_tar
from tests.waiting import best_of

COUNT, SIDE, LIMIT_MB = 1000, 256, 60


@cache
def images() -> dict[str, bytes]:
    """Return images of about 200 kB each, so that a shard of all images has 200 MB."""
    digits = [png(n, SIDE) for n in range(10)]
    return {f"{n:04}.png": digits[n % 10] + bytes([n % 256, n // 256]) for n in range(COUNT)}


def peak_mb(bundle: Bundle, source: Path, folder: Path, shard_images: int) -> float:
    """Return the largest resident memory of the run's processes, in MB."""
    words = ["classify", "--bundle", str(bundle.path), "--from", str(source), "--to", str(folder), "--workers", "1"]
    options = ["--runner", "onnxruntime", "--shard-images", str(shard_images)]
    arguments = [sys.executable, "-m", "gmmvit_cli.main", *words, *options]
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)  # also of the workers that the process has waited for
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    assert len(list(folder.glob("shard-*.parquet"))) == -(-COUNT // shard_images)
    return usage.ru_maxrss / 1024


@pytest.mark.nightly
@pytest.mark.integration
@pytest.mark.parametrize("kind", ["folder", "tar", "parquet"])
def test_memory_does_not_grow_with_the_shard(kind: str, bundle: Bundle, tmp_path: Path) -> None:
    source = tmp_path / "source"
    if kind == "folder":
        write_folder(source, images())
    elif kind == "tar":
        write_tar(source / "images.tar", images())
    else:
        write_parquet(source / "images.parquet", list(images().values()), pa.binary(), group=COUNT)

    def growth_mb() -> float:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        small, large = (peak_mb(bundle, source, folder / f"to-{size}", size) for size in (50, COUNT))
        print(f"{small:.0f} MB with shards of 50 images, {large:.0f} MB with {COUNT}")
        return large - small

    assert best_of(3, growth_mb, enough=LIMIT_MB) <= LIMIT_MB
