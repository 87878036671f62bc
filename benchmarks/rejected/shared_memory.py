"""Is shared memory between client and server faster than messages?

Pixels and logits are either sent in messages or exchanged in shared memory. The network is the paper's ViT d9 with a
Gaussian mixture mask (32×32, uint8 pixels). A real Triton server runs the network in OpenVINO, the fastest runtime on
CPUs, so that the messages take the largest share of the time. NVIDIA's client sends the requests in sequence, and the
two ways take turns. The times include filling and reading the shared memory. The logits must be equal.

    python benchmarks/rejected/shared_memory.py [--rounds 60] [--check]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import shared_memory

from benchmarks.shared.options import parsed
from benchmarks.shared.places import result_of
from gmmvit_deploy.bench import run_card
from gmmvit_deploy.bench.interleaved import turns
from gmmvit_deploy.bench.statistics import ratio
from gmmvit_deploy.bench.words import ratio_words
from gmmvit_deploy.parity.inputs import fresh_inputs
from gmmvit_deploy.serving.model_configs import RepositoryOptions
from gmmvit_deploy.serving.repository import repository_from_bundle
from gmmvit_deploy.serving.server import ServerOptions, TritonServer
from tests.random_bundles import random_bundle

BATCHES = (1, 8, 64)
CLIENTS = {"grpc": tritonclient.grpc, "http": tritonclient.http}
_NETWORK = "gmmvit_network"
_CLASSES = 10
_WARM_UP_ROUNDS = 3

Ask = Callable[[], np.ndarray]


def in_messages(client: Any, module: Any, pixels: np.ndarray) -> Ask:
    def ask() -> np.ndarray:
        tensor = module.InferInput("pixels", pixels.shape, "UINT8")
        tensor.set_data_from_numpy(pixels)
        output = module.InferRequestedOutput("logits")
        return client.infer(_NETWORK, [tensor], outputs=[output]).as_numpy("logits")

    return ask


@contextmanager
def in_shared_memory(client: Any, module: Any, pixels: np.ndarray, name: str) -> Iterator[Ask]:
    sizes = {f"{name}-in": pixels.nbytes, f"{name}-out": len(pixels) * _CLASSES * 4}
    regions = {key: shared_memory.create_shared_memory_region(key, f"/{key}", size) for key, size in sizes.items()}
    (inside, outside), (taken, given) = sizes, sizes.values()
    try:
        for key, size in sizes.items():
            client.register_system_shared_memory(key, f"/{key}", size)

        def ask() -> np.ndarray:
            shared_memory.set_shared_memory_region(regions[inside], [pixels])
            tensor = module.InferInput("pixels", pixels.shape, "UINT8")
            tensor.set_shared_memory(inside, taken)
            output = module.InferRequestedOutput("logits")
            output.set_shared_memory(outside, given)
            client.infer(_NETWORK, [tensor], outputs=[output])
            return shared_memory.get_contents_as_numpy(regions[outside], np.float32, (len(pixels), _CLASSES)).copy()

        yield ask
    finally:
        for key, region in regions.items():
            client.unregister_system_shared_memory(key)
            shared_memory.destroy_shared_memory_region(region)


def timed(ways: dict[str, Ask], rounds: int, queries: int) -> dict[str, np.ndarray]:
    """Return name of the way → median ms of the queries in each round."""
    generator = np.random.default_rng(0)
    medians: dict[str, list[float]] = {way: [] for way in ways}
    for way, counts in turns(list(ways), rounds, generator, warm_ups=_WARM_UP_ROUNDS):
        times = []
        for _ in range(queries):
            start = time.perf_counter()
            ways[way]()
            times.append(1e3 * (time.perf_counter() - start))
        if counts:
            medians[way].append(float(np.median(times)))
    return {way: np.array(values) for way, values in medians.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--batch", type=int, choices=BATCHES, action="append", help="only this batch; may be repeated")
    parser.add_argument("--output", type=Path, default=result_of(__file__))
    arguments = parsed(parser, rounds=1, batch=[1])
    with (
        run_card.written(arguments.output, "shared_memory.py", rounds=arguments.rounds) as results,
        tempfile.TemporaryDirectory() as folder,
    ):
        bundle = random_bundle(Path(folder))
        repository = repository_from_bundle(bundle, Path(folder) / "repository", RepositoryOptions(runtime="openvino"))
        ports = ServerOptions(http_port=0, grpc_port=0, metrics_port=0)
        with TritonServer(repository.path, options=ports) as server:
            for protocol, module in CLIENTS.items():
                url = server.grpc_url if protocol == "grpc" else server.http_url
                client = module.InferenceServerClient(url.partition("//")[2])
                for batch in arguments.batch or BATCHES:
                    pixels = fresh_inputs(bundle, batch)
                    message = in_messages(client, module, pixels)
                    with in_shared_memory(client, module, pixels, f"gmmvit-{protocol}-{batch}") as shared:
                        if not np.array_equal(message(), shared()):
                            raise SystemExit(f"{protocol}, batch {batch}: the logits of the two ways differ")
                        times = timed({"messages": message, "shared": shared}, arguments.rounds, max(2, 16 // batch))
                    relative = ratio(times["shared"], times["messages"])
                    row = {"messages_ms": float(np.median(times["messages"])), "shared_over_messages": relative}
                    results.setdefault(protocol, {})[str(batch)] = row
                    print(f"{protocol}, batch {batch}: shared memory / messages {ratio_words(relative)}")


if __name__ == "__main__":
    main()
