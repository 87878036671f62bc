"""How much throughput does the server cost? Triton over gRPC and HTTP compared with the same runner in process.

The network is the paper's ViT d9 with a Gaussian mixture mask (32×32, 10 classes, K = 5, random weights), and pixels
are the input. The server and the runner in process use the same runtime and precision, both with our kernels.

The throughput is that of LoadGen's Offline scenario: batches of 64 images in process, and up to four requests of 64
images (uint8) to the server, in turn; wrong logits stop the script. Then the script searches, for each protocol, the
highest rate of Poisson arrivals of single images whose p99 latency stays within the bound.

    python benchmarks/served.py [--rounds 10] [--check] [--output RESULT]
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.shared import run_card
from benchmarks.shared.options import parsed, script_parser
from benchmarks.shared.results import interval
from gmmvit_deploy.bench.cells import Cell, Plan, measure, ratios
from gmmvit_deploy.bench.outputs import Expected
from gmmvit_deploy.bench.served_load import search_rate
from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.exporting.golden import fresh_inputs
from gmmvit_deploy.inference.runner_name import RunnerName
from gmmvit_deploy.measure.statistics import ratio
from gmmvit_deploy.runtimes.runners.open import open_runners
from gmmvit_deploy.serving.options import RepositoryOptions
from gmmvit_deploy.serving.repository import repository_from_bundle
from gmmvit_deploy.serving.server import ServerOptions, TritonServer
from tests.random_bundles import random_bundle

RUNNERS = ("onnxruntime", "openvino+kernels", "openvino+kernels:bf16")
BOUND_MS = 100.0


def served(bundle: Bundle, runner: str, folder: Path, plan: Plan, *, searched: bool) -> dict[str, Any]:
    settings = RepositoryOptions(runner=RunnerName.parse(runner))
    repository = repository_from_bundle(bundle, folder / runner.replace(":", "-"), settings)
    ports = ServerOptions(http_port=0, grpc_port=0, metrics_port=0)
    inputs = fresh_inputs(bundle, 4 * plan.batches[0])
    expected = Expected(bundle, inputs)
    names = [runner, "triton-grpc", "triton-http"]
    with ExitStack() as stack:
        server = stack.enter_context(TritonServer(repository.path, options=ports))
        urls = [server.grpc_url, server.http_url]
        runners = stack.enter_context(open_runners(names, bundle, urls=urls))
        cells = measure(runners, inputs, expected, plan)
        offline = [cell for cell in cells if cell.scenario == "Offline"]
        for cell in cells:
            if not cell.outputs.right:
                off, limit = cell.outputs.largest, cell.outputs.limit
                raise SystemExit(f"{cell.name}: the logits differ by {off:.2g}, expected at most {limit:.2g}")
        row: dict[str, Any] = {"cells": [_described(cell) for cell in offline], "share_of_in_process": {}}
        for cell, first, _ in ratios(offline):
            protocol = cell.runner.partition(":")[0].removeprefix("triton-")
            row["share_of_in_process"][protocol] = ratio(first.times, cell.times)
        if searched:
            row["arrivals"] = [
                asdict(search_rate(runner, inputs, expected, bound_ms=BOUND_MS, max_rate=cell.samples_per_second))
                for runner, cell in zip(runners[1:], offline[1:], strict=True)
            ]
    return row


def _described(cell: Cell) -> dict[str, Any]:
    return {"runner": cell.runner, "images_per_second": cell.samples_per_second, "round_ms": cell.times}


def main() -> None:
    parser = script_parser(__doc__, __file__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=1.0, help="approximate time of a runner in a round")
    parser.add_argument("--batch", type=int, default=64, help="images of a request")
    parser.add_argument(
        "--runtime",
        choices=RUNNERS,
        action="append",
        help="only this runtime and precision; may be repeated",
    )
    parser.add_argument("--no-arrivals", action="store_true", help="leave the search of the arrival rate out")
    arguments = parsed(parser, rounds=1, seconds=0.1, batch=4, runtime=[RUNNERS[0]], no_arrivals=True)
    seconds = arguments.rounds * arguments.seconds
    plan = Plan(batches=(arguments.batch,), rounds=arguments.rounds, seconds=seconds)
    with run_card.written(
        arguments.output, "served.py", rounds=arguments.rounds, batch=arguments.batch, bound_ms=BOUND_MS
    ) as results:
        results["runtimes"] = {}
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            bundle = random_bundle(folder)
            for name in arguments.runtime or RUNNERS:
                row = served(bundle, name, folder, plan, searched=not arguments.no_arrivals)
                results["runtimes"][name] = row
                for cell in row["cells"]:
                    print(f"{name}: {cell['runner']}: {cell['images_per_second']:,.0f} images a second")
                for protocol, share in row["share_of_in_process"].items():
                    print(f"{name}: {protocol}: {interval(share)} of the throughput in process")
                for load in row.get("arrivals", []):
                    best = load["best"]
                    best_rate = (
                        f"{best['rate']:,.0f} a second, p99 {best['p99_ms']:.1f} ms" if best else "at no tested rate"
                    )
                    print(f"{name}: {load['runner']}: p99 below {BOUND_MS:g} ms: {best_rate}")


if __name__ == "__main__":
    main()
