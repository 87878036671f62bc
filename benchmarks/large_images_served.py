"""Does the server use the cores for large images? Decoder, network and ensemble with photographs and 16 clients.

The images are JPEG files of 12 megapixels (4000×3000), the network the paper's ViT d9 (32×32). In each round, in turn,
16 clients send single images over gRPC to

    decoder    the model that converts encoded images to the network's input
    network    the network, whose clients send pixels
    ensemble   both

A perfect server would need the sum of the times of decoder and network for an image. *Share* is the ensemble's
throughput divided by 1 / (1 / decoder + 1 / network), for several numbers of threads of the preprocessing; 0, the
default of `gmmvit repository`, is a thread for each core.

    python benchmarks/large_images_served.py [--rounds 5] [--images 48] [--check] [--output RESULT]
"""

from __future__ import annotations

import io
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.shared import run_card
from benchmarks.shared.interleaved import turns
from benchmarks.shared.options import parsed, script_parser
from benchmarks.shared.results import interval
from gmmvit_deploy.bench.outputs import Expected
from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.measure.statistics import ratio
from gmmvit_deploy.parity.measures import distance
from gmmvit_deploy.runtimes.programs.triton import TritonConnection
from gmmvit_deploy.serving.options import RepositoryOptions
from gmmvit_deploy.serving.repository import repository_from_bundle
from gmmvit_deploy.serving.server import ServerOptions, TritonServer
from tests.random_bundles import random_bundle

CLIENTS = 16
TARGET = 0.9
WIDTH, HEIGHT = 4000, 3000
_PHOTOGRAPHS = 4
_NETWORK_IMAGES = 40
"""The network needs less time for an image than the decoder, so its turn has so many times more images."""


def photograph(seed: int) -> bytes:
    """Return a JPEG of smooth shapes with noise, about 2 MB."""
    generator = np.random.default_rng(seed)
    small = Image.fromarray(generator.integers(0, 256, (30, 40, 3), dtype=np.uint8))
    smooth = np.asarray(small.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), np.int16)
    noisy = smooth + generator.integers(-6, 7, smooth.shape, dtype=np.int16)
    file = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


def images_per_second(run: Any, count: int, pool: ThreadPoolExecutor, expected: Expected | None) -> float:
    """Return the images a second of 16 clients.  expected: the logits of the photographs; None without a check."""
    indices = np.arange(count) % _PHOTOGRAPHS
    start = time.perf_counter()
    answers = list(pool.map(run, indices))
    seconds = time.perf_counter() - start
    if expected is not None:
        largest, limit = distance(np.concatenate(answers), expected.exact[indices]), expected.limit("fp32")
        if not largest <= limit.largest:
            raise SystemExit(f"the logits differ by {largest:.2g}, expected at most {limit.largest:.2g}")
    return count / seconds


def measured(bundle: Bundle, threads: int, folder: Path, rounds: int, images: int) -> dict[str, Any]:
    options = RepositoryOptions(preprocess_threads=threads)
    repository = repository_from_bundle(bundle, folder / f"models-{threads}", options)
    photographs = [photograph(seed) for seed in range(_PHOTOGRAPHS)]
    encoded = np.array([[photograph] for photograph in photographs], dtype=np.object_)
    decoded = np.stack([bundle.manifest.image.pixels_from_bytes(data) for data in photographs])
    inputs = bundle.inputs_from_pixels(decoded)
    expected = Expected(bundle, inputs)
    kind = bundle.manifest.input_kind
    with ExitStack() as stack:
        ports = ServerOptions(http_port=0, grpc_port=0, metrics_port=0)
        server = stack.enter_context(TritonServer(repository.path, options=ports))
        connection = stack.enter_context(TritonConnection(server.grpc_url))
        pool = stack.enter_context(ThreadPoolExecutor(CLIENTS))
        programs: dict[str, tuple[Any, int, Expected | None]] = {
            "decoder": (
                lambda i: connection.infer("gmmvit_preprocess", "IMAGE", encoded[i : i + 1], output=kind),
                images,
                None,
            ),
            "network": (
                lambda i: connection.infer("gmmvit_network", kind, inputs[i : i + 1]),
                images * _NETWORK_IMAGES,
                expected,
            ),
            "ensemble": (lambda i: connection.infer("gmmvit", "IMAGE", encoded[i : i + 1]), images, expected),
        }
        rates: dict[str, list[float]] = {name: [] for name in programs}
        for name, timed in turns(list(programs), rounds, np.random.default_rng(threads), warm_ups=1):
            run, count, truth = programs[name]
            rate = images_per_second(run, count, pool, truth)
            if timed:
                rates[name].append(rate)
    model = [
        1 / (1 / decoder + 1 / network) for decoder, network in zip(rates["decoder"], rates["network"], strict=True)
    ]
    slower = [min(pair) for pair in zip(rates["decoder"], rates["network"], strict=True)]
    return {
        "images_per_second": {name: float(np.median(values)) for name, values in rates.items()},
        "round_images_per_second": rates,
        "jpeg_bytes": [len(data) for data in photographs],
        "share_of_sum": ratio(rates["ensemble"], model),
        "share_of_slower": ratio(rates["ensemble"], slower),
    }


def main() -> None:
    parser = script_parser(__doc__, __file__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--images", type=int, default=48, help="photographs in a turn")
    parser.add_argument("--threads", type=int, nargs="+", default=[0, 1])
    arguments = parsed(parser, rounds=1, images=4, threads=[0])
    conditions = {
        "rounds": arguments.rounds,
        "images": arguments.images,
        "clients": CLIENTS,
        "megapixels": WIDTH * HEIGHT / 1e6,
        "target_share": TARGET,
    }
    with run_card.written(arguments.output, "large_images_served.py", **conditions) as results:
        results["threads"] = {}
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            bundle = random_bundle(folder)
            for threads in arguments.threads:
                row = measured(bundle, threads, folder, arguments.rounds, arguments.images)
                results["threads"][str(threads)] = row
                rates = ", ".join(f"{name} {rate:.1f}" for name, rate in row["images_per_second"].items())
                print(f"{threads} threads: {rates} images a second; {interval(row['share_of_sum'])} of the sum")


if __name__ == "__main__":
    main()
