"""How long do other clients wait while image bombs arrive?

The server is ``gmmvit serve``'s, with the paper's ViT d9 with a Gaussian mixture mask. Clients of the ensemble send an
image of 32×32 each in closed loop. In turn, nothing else arrives, or bombs do: other clients send requests with PNG
images of 49 million pixels (150 kB each) in sequence. A bomb within the budget of pixels is decoded, and a bomb
above it is refused. The phases alternate, so that a change of the machine's speed concerns both.

    python benchmarks/reported/image_bombs.py [--rounds 6] [--seconds 5] [--check] [--output RESULT]
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.shared.options import parsed
from benchmarks.shared.places import result_of
from gmmvit_deploy.bench import run_card
from gmmvit_deploy.errors import ServerError
from gmmvit_deploy.runtime.triton import TritonConnection
from gmmvit_deploy.serving.repository import repository_from_bundle
from gmmvit_deploy.serving.server import ServerOptions, TritonServer
from tests.hostile.images import bomb, photo
from tests.random_bundles import random_bundle

CLIENTS, BOMBERS = 2, 2
BOMBS: dict[str, int] = {"49 Mpx": 1, "196 Mpx": 4, "1,568 Mpx, refused": 32}
"""Name → number of images in a request of the bombs."""
BOUND = 2.0
"""The largest allowed p99 of the other clients, divided by their p99 without bombs."""


def as_input(images: list[bytes]) -> NDArray[Any]:
    return np.array([[image] for image in images], dtype=np.object_)


def ask(url: str, images: NDArray[Any], until: float, latencies: list[float], answers: Counter[str]) -> None:
    """Send requests in sequence, at least a single request; record latencies in milliseconds, and kinds of answers."""
    with TritonConnection(url) as connection:
        while not latencies or time.monotonic() < until:
            started = time.perf_counter()
            try:
                connection.infer("gmmvit", "IMAGE", images)
                answers["answered"] += 1
            except ServerError:
                answers["refused"] += 1
                time.sleep(0.02)  # a refused client waits before it sends again
            latencies.append((time.perf_counter() - started) * 1000)


def phase(url: str, seconds: float, bombs: int) -> tuple[list[float], Counter[str]]:
    """Return (latencies of the other clients in milliseconds, answers to the bombs) of a phase."""
    until = time.monotonic() + seconds
    latencies: list[float] = []
    answers: Counter[str] = Counter()
    small, large = as_input([photo(size=(32, 32))]), as_input([bomb()] * bombs)
    others: Counter[str] = Counter()
    threads = [threading.Thread(target=ask, args=(url, small, until, latencies, others)) for _ in range(CLIENTS)]
    if bombs:
        threads += [threading.Thread(target=ask, args=(url, large, until, [], answers)) for _ in range(BOMBERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if others["refused"]:
        raise SystemExit(f"{others['refused']} requests of the other clients were refused")
    return latencies, answers


def row(latencies: list[float]) -> dict[str, float]:
    p50, p99 = map(float, np.percentile(latencies, [50, 99]))
    return {"requests": len(latencies), "p50_ms": p50, "p99_ms": p99, "max_ms": max(latencies)}


def measured(url: str, rounds: int, seconds: float) -> dict[str, Any]:
    """Return name of the bombs → latencies without and with these bombs, from phases in turn."""
    results: dict[str, Any] = {}
    for name, images in BOMBS.items():
        usual: list[float] = []
        hit: list[float] = []
        answers: Counter[str] = Counter()
        for _ in range(rounds):
            usual += phase(url, seconds, 0)[0]
            latencies, answered = phase(url, seconds, images)
            hit += latencies
            answers += answered
        rows = {"without": row(usual), "with": row(hit)}
        ratio = float(rows["with"]["p99_ms"] / rows["without"]["p99_ms"])
        results[name] = {**rows, "p99_ratio": ratio, "within": bool(ratio <= BOUND), "bombs": dict(answers)}
        print(f"{name}: p99 {rows['without']['p99_ms']:.1f} → {rows['with']['p99_ms']:.1f} ms ({ratio:.2f})", answers)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--output", type=Path, default=result_of(__file__))
    arguments = parsed(parser, rounds=1, seconds=0.5)
    with (
        run_card.written(
            arguments.output,
            Path(__file__).name,
            rounds=arguments.rounds,
            seconds=arguments.seconds,
            clients=CLIENTS,
            bombers=BOMBERS,
        ) as results,
        tempfile.TemporaryDirectory() as folder,
    ):
        repository = repository_from_bundle(random_bundle(Path(folder)), Path(folder) / "models")
        ports = ServerOptions(http_port=0, grpc_port=0, metrics_port=0)
        with TritonServer(repository.path, options=ports) as server:
            phase(server.grpc_url, arguments.seconds, 1)  # warm-up
            results["bombs"] = measured(server.grpc_url, arguments.rounds, arguments.seconds)


if __name__ == "__main__":
    main()
