"""Does decoding keep up with the network in bulk? The rate of gmmvit classify --from compared with its network alone.

Each row is a network of the paper's size with images of its kind. Three programs take turns in each round, each with a
process for each core:

    bulk      gmmvit classify --from, as a user runs it: read, hash, decode, network, write Parquet
    runner    the same runner in the same batches on decoded images, without reading and decoding
    decoder   read, hash and decode the images without a network

The expected rate is 0.9 of the smaller rate of runner and decoder. If both need the same cores, no program can exceed 1
/ (1 / runner + 1 / decoder), the ``limit`` of the result. Starting processes, compiling and the first batches are not
counted.

    python benchmarks/bulk.py [--rounds 5] [--check] [--output RESULT]
"""

from __future__ import annotations

import io
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.shared import run_card
from benchmarks.shared.options import parsed, script_parser
from gmmvit_deploy.bulk.job import open_bulk_runner
from gmmvit_deploy.bulk.pipeline import decoded_batches
from gmmvit_deploy.bulk.run import classify_source
from gmmvit_deploy.bulk.source import Entry, open_source
from gmmvit_deploy.bundle.artifacts import Bundle, open_bundle
from gmmvit_deploy.exporting.options import ExportOptions
from gmmvit_deploy.images.data.formats import digits
from gmmvit_deploy.inference.cores import cores
from gmmvit_deploy.measure.statistics import ratio
from gmmvit_deploy.progress import Progress
from tests.random_bundles import bundle_of, random_vit

RUNNER = "onnxruntime"
MIN_SHARE = 0.9
_SHARDS_A_PROCESS = 2
_MIN_BATCHES = 8
"""Batches of a process: two are not counted."""


def digit_images(count: int) -> Iterator[bytes]:
    """Yield PNG images of noisy digits, 16×16; every 1000th is broken, every 997th is the image before."""
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


def photo_like(folder: Path, count: int) -> Path:
    """Write JPEG images of 224×224 pixels: smooth colours with noise, of the size in bytes of photographs."""
    generator = np.random.default_rng(0)
    folder.mkdir()
    for number in range(count):
        coarse = Image.fromarray(generator.integers(0, 256, (14, 14, 3), dtype=np.uint8)).resize((224, 224))
        noisy = np.asarray(coarse, np.int16) + generator.integers(-12, 13, (224, 224, 3))
        file = io.BytesIO()
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
        (folder / f"{number:05}.jpg").write_bytes(file.getvalue())
    return folder


def rate_of(events: list[tuple[float, int]], processes: int) -> float:
    """Return images a second between two of the (time, images done), each of which ends a batch of a process.

    The processes start together, so the rate counts from the last of their second batches: counted from the first
    batch, the others would seem to take no time.
    """
    (first_at, first), (last_at, last) = events[2 * processes - 1], events[-1]
    return (last - first) / (last_at - first_at)


def bulk_rate(bundle: Bundle, source: Path, folder: Path, images: int) -> float:
    """Classify everything, and return images a second."""
    events: list[tuple[float, int]] = []

    def on_progress(event: Progress) -> None:
        if event.step == "classify" and event.done:
            events.append((time.monotonic(), event.done))

    shutil.rmtree(folder, ignore_errors=True)
    size = images // (_SHARDS_A_PROCESS * cores())
    classify_source(bundle.path, str(source), str(folder), runner=RUNNER, shard_images=size, on_progress=on_progress)
    return rate_of(events, cores())


def _of_runner(path: Path, batches: int, start: Any) -> tuple[float, float]:
    bundle = open_bundle(path)
    pixels = np.random.default_rng(0).integers(
        0, 256, (bundle.manifest.max_batch, *bundle.manifest.image.pixels_shape), dtype=np.uint8
    )
    with open_bulk_runner(RUNNER, bundle) as runner:
        runner.run_all(bundle.inputs_from_pixels(pixels))
        start.wait()
        began = time.monotonic()
        for _ in range(batches):
            runner.run_all(bundle.inputs_from_pixels(pixels))
        return began, time.monotonic()


def _of_decoder(path: Path, folder: Path, part: int, start: Any) -> tuple[float, float]:
    bundle = open_bundle(path)
    source = open_source(str(folder))
    entries: list[Entry] = [entry for _, entry in source.entries()][part :: cores()]
    with ThreadPoolExecutor(1) as pool:
        start.wait()
        began = time.monotonic()
        contents = source.contents("", entries)
        for _ in decoded_batches(contents, bundle.manifest.image, batch=64, pool=pool, threads=1):
            pass
        return began, time.monotonic()


def _in_processes(images: int, work: Callable[..., tuple[float, float]], arguments: list[tuple[Any, ...]]) -> float:
    """Run ``work`` in a process for each core, all from the same moment on, and return images a second."""
    context = get_context("spawn")
    with context.Manager() as manager:
        start = manager.Barrier(len(arguments))
        with context.Pool(len(arguments)) as pool:
            times = pool.starmap(work, [(*values, start) for values in arguments], chunksize=1)
    return images / (max(end for _, end in times) - min(begin for begin, _ in times))


def measured(bundle: Bundle, source: Path, folder: Path, rounds: int, images: int) -> dict[str, Any]:
    batch = bundle.manifest.max_batch
    each = max(1, images // batch // cores())
    programs: dict[str, Callable[[], float]] = {
        "bulk": lambda: bulk_rate(bundle, source, folder, images),
        "runner": lambda: _in_processes(each * batch * cores(), _of_runner, [(bundle.path, each)] * cores()),
        "decoder": lambda: _in_processes(images, _of_decoder, [(bundle.path, source, part) for part in range(cores())]),
    }
    rates: dict[str, list[float]] = {name: [] for name in programs}
    generator = np.random.default_rng(0)
    for number in range(rounds + 1):  # the first round is a warm-up
        for name in generator.permutation([*programs]):
            rate = programs[str(name)]()
            if number or not rounds:
                rates[str(name)].append(rate)
    slower = [min(pair) for pair in zip(rates["runner"], rates["decoder"], strict=True)]
    limit = [1 / (1 / a + 1 / b) for a, b in zip(rates["runner"], rates["decoder"], strict=True)]
    share = ratio(np.array(rates["bulk"]), np.array(slower))
    return {
        "images": images,
        "batch": batch,
        "images_per_second": {name: float(np.median(values)) for name, values in rates.items()},
        "limit_per_second": float(np.median(limit)),
        "share": share,
        "share_of_limit": ratio(np.array(rates["bulk"]), np.array(limit)),
        "kept": share.value >= MIN_SHARE,
    }


def main() -> None:
    least = _MIN_BATCHES * cores() * ExportOptions().max_batch
    parser = script_parser(__doc__, __file__)
    parser.add_argument("--rounds", type=int, default=5, help="0 measures the warm-up")
    parser.add_argument("--png", type=int, default=max(4096, least), metavar="IMAGES")
    parser.add_argument("--jpeg", type=int, default=max(1024, least), metavar="IMAGES", help="0: without this row")
    arguments = parsed(parser, rounds=0, png=least, jpeg=0)
    if arguments.png < least or 0 < arguments.jpeg < least:
        parser.error(f"on {cores()} cores, type at least --png {least} and --jpeg {least}")
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(cores())
    with (
        tempfile.TemporaryDirectory() as temporary,
        run_card.written(arguments.output, "bulk.py", rounds=arguments.rounds, runner=RUNNER) as results,
    ):
        folder = Path(temporary)
        small = random_vit()
        large = random_vit(image_size=224, patch_size=16)
        cells = {"PNG, 16×16": (small, write_images(folder / "png", arguments.png), arguments.png)}
        if arguments.jpeg:
            cells["JPEG, 224×224"] = (large, photo_like(folder / "jpeg", arguments.jpeg), arguments.jpeg)
        results["cores"], results["rows"] = cores(), {}
        for number, (name, (model, source, images)) in enumerate(cells.items()):
            bundle = bundle_of(model, folder, name=f"bundle_{number}")
            results["rows"][name] = measured(bundle, source, folder / "to", arguments.rounds, images)
            print(name, results["rows"][name], flush=True)


if __name__ == "__main__":
    main()
