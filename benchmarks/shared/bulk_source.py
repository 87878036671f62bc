"""Images of digits and noise for the scripts about classification in bulk, and the rows of a job."""

from __future__ import annotations

import hashlib
import io
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
from PIL import Image

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.images.data.formats import digits

__all__ = ["command", "digit_images", "rows_of", "shards_in", "write_images"]


def digit_images(count: int) -> Iterator[bytes]:
    """Yield PNG images of 16×16 pixels: digits with noise.

    Every thousandth image is broken, and every 997th image is the image before.
    """
    generator = np.random.default_rng(24)
    known = digits("train")
    last = b""
    for number in range(count):
        if number % 997 != 1:
            grey = np.kron(known._images[number % len(known)], np.ones((2, 2), np.uint8))  # type: ignore[attr-defined]
            noisy = grey.astype(np.int16) + generator.integers(-40, 41, grey.shape)
            file = io.BytesIO()
            Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "PNG", compress_level=1)
            last = file.getvalue()
        yield last[: len(last) // 2] if number % 1000 == 999 else last


def write_images(folder: Path, count: int) -> Path:
    """Write `digit_images` to ``folder``, a thousand in each subfolder."""
    for number, data in enumerate(digit_images(count)):
        if number % 1000 == 0:
            part = folder / f"{number // 1000:03}"
            part.mkdir(parents=True)
        (part / f"{number:06}.png").write_bytes(data)
    return folder


def command(bundle: Bundle, source: Path, folder: Path, *options: str) -> list[str]:
    """Return the command that classifies ``source``."""
    places = ["--bundle", str(bundle.path), "--from", str(source), "--to", str(folder)]
    start = [sys.executable, "-m", "gmmvit_cli.main", "classify", *places]
    return [*start, "--runner", "onnxruntime", "--accept-broken", "--json", *options]


def shards_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("shard-*.parquet"))


def rows_of(folder: Path) -> tuple[int, int, str]:
    """Return (rows, distinct ids, SHA-256 over every value of every row in the order of the ids)."""
    table = parquet.read_table(folder).sort_by("id")
    digest = hashlib.sha256()
    for batch in table.to_batches(max_chunksize=10_000):
        for row in batch.to_pylist():
            logits = b"" if row["logits"] is None else np.array(row["logits"], np.float32).tobytes()
            probability = "" if row["probability"] is None else float(row["probability"]).hex()
            texts = [row[name] for name in ("id", "sha256", "label", "error", "bundle_sha256")]
            digest.update(repr((texts, probability)).encode() + logits)
    return table.num_rows, len(set(table.column("id").to_pylist())), digest.hexdigest()
