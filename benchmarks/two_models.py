"""Do two models share the cores better in one service, or in two services with half of the cores each?

A light and a heavy network (ViT d9 with a Gaussian mixture mask, 32×32, with 3 and 9 blocks, random weights) get PNG
files at the same time, from clients that wait for their answers, over Triton's HTTP:

    together    one server has both models, and each network uses all cores
    apart       a server for each model, on half of the cores

The clients run in this process, on all cores.

    python benchmarks/two_models.py [--rounds 10] [--check] [--output RESULT]
"""

from __future__ import annotations

import http.client
import os
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from benchmarks.gateway_cost import png
from benchmarks.shared import run_card
from benchmarks.shared.options import parsed, script_parser
from benchmarks.shared.results import interval
from gmmvit_deploy.measure.statistics import nearest_rank, ratio
from gmmvit_deploy.serving.options import RepositoryOptions
from gmmvit_deploy.serving.repository import add_to_repository
from gmmvit_deploy.serving.server import ServerOptions, TritonServer
from tests.random_bundles import bundle_of, random_vit

BLOCKS = {"light": 3, "heavy": 9}
LOADS = {"even": {"light": 8, "heavy": 8}, "uneven": {"light": 1, "heavy": 8}}
"""Load → clients of each model."""


def started(folder: Path, models: tuple[str, ...], cores: list[int], stack: ExitStack) -> dict[str, int]:
    """Start a server with models on these cores; return model → its port for HTTP."""
    parent, repository = Path(tempfile.mkdtemp(dir=folder)), Path(tempfile.mkdtemp(dir=folder))
    for name in models:
        bundle = bundle_of(random_vit(depth=BLOCKS[name]), parent, name=name)
        add_to_repository(bundle, repository, RepositoryOptions(name=name))
    all_cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)  # the server inherits it
    server = stack.enter_context(
        TritonServer(repository, options=ServerOptions(http_port=0, grpc_port=0, metrics_port=0))
    )
    os.sched_setaffinity(0, all_cores)
    return dict.fromkeys(models, server.http_port)


def measured(ports: dict[str, int], clients: dict[str, int], seconds: float) -> dict[str, float]:
    """Return the sum of the rates, and the p99 of each model in ms.  Errors: SystemExit for an answer with an error."""
    times: dict[str, list[float]] = {name: [] for name in clients}
    statuses, image, end = set[int](), png(), time.monotonic() + seconds

    def ask(name: str) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", ports[name], timeout=60)
        while time.monotonic() < end:
            began = time.monotonic()
            connection.request("POST", f"/v2/models/{name}/infer", image, {"Inference-Header-Content-Length": "0"})
            answer = connection.getresponse()
            answer.read()
            times[name].append(1000 * (time.monotonic() - began))
            statuses.add(answer.status)

    threads = [threading.Thread(target=ask, args=(name,)) for name, count in clients.items() for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if statuses != {200} or not all(times.values()):
        raise SystemExit(f"expected answers with status 200 from each model, got {statuses}")
    return {"rate": sum(map(len, times.values())) / seconds, **{n: nearest_rank(ms, 0.99) for n, ms in times.items()}}


def main() -> None:
    parser = script_parser(__doc__, __file__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=5.0, help="time of each measurement in a round")
    arguments = parsed(parser, rounds=1, seconds=1.0)
    cores, generator = sorted(os.sched_getaffinity(0)), np.random.default_rng(0)
    half = len(cores) // 2
    card = run_card.written(arguments.output, "two_models.py", rounds=arguments.rounds, round_s=arguments.seconds)
    with card as results, tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        places = {"together": started(Path(temporary), ("light", "heavy"), cores, stack)}
        light = started(Path(temporary), ("light",), cores[:half], stack)
        places["apart"] = {**light, **started(Path(temporary), ("heavy",), cores[half:], stack)}
        rows: dict[str, dict[str, list[dict[str, float]]]] = {load: {place: [] for place in places} for load in LOADS}
        for number in range(arguments.rounds + 1):  # the first round is a warm-up
            for load, clients in LOADS.items():
                for place in map(str, generator.permutation(list(places))):
                    row = measured(places[place], clients, arguments.seconds)
                    rows[load][place] += [row] if number else []
        results["rows"], results["problems"] = rows, []
        for load, of_places in rows.items():
            rates = [[row["rate"] for row in of_places[place]] for place in ("together", "apart")]
            print(f"{load}: the sum of the rates, together / apart: {interval(ratio(*rates))}")
            for name in BLOCKS:
                p99 = {place: np.median([row[name] for row in of_places[place]]) for place in places}
                print(f"{load}: p99 of {name}: {p99['together']:.1f} ms together, {p99['apart']:.1f} ms apart")


if __name__ == "__main__":
    main()
