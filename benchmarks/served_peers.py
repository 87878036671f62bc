"""How fast is an image classifier by HTTP? gmmvit serve compared with LitServe, BentoML, Ray Serve, mosec and FastAPI.

The networks are the paper's ViT d9 with a Gaussian mixture mask (``vit32``: 32×32, 10 classes, K = 5; a PNG file a
request) and a ViT-S/16 (``vits224``: 224×224; a JPEG file of 500×334 a request), with random weights unless ``--network
BUNDLE`` is given.

A peer's service (`peer_services/NAME_service.py`) is written as the peer's own pages show it. It has the straight
export in ONNX Runtime and in OpenVINO, and the preprocessing of the bundle in Pillow and numpy; it waits at most 1 ms
for a batch to fill. It is tried with one process that has a thread for each core, and with a process for each core; the
fastest of these four services stands for the peer at each number of clients. Ours is ``gmmvit serve`` as it starts:
Triton's own path, and ``POST /classify``. ``--optimized BUNDLE`` adds a bundle for which ``gmmvit optimize`` has chosen
a runner on this machine: its answers are not float32's, so the result has the share of images with the same class. The
services set float32, which OpenVINO does not take by itself on a CPU with AVX512-BF16; with ``--optimized``, they are
also tried in bf16, and with ``--quantized GRAPH`` (of NNCF, as `int8_real.py` makes it) in int8.

    closed      1 and 16 clients that wait for their answers (wrk), with image files
    tensors     the same with pixels, which need no decoding
    open        requests at random times (Poisson arrivals), at half of the lowest capacity of ours and the best peer's

The programs take turns in each round, on the same cores as their load, and the processes of all others are stopped
meanwhile. A wrong float32 answer stops the script. The peers have an environment of their own, ``--peers PYTHON`` (`pip
install litserve bentoml "ray[serve]" mosec fastapi "uvicorn[standard]" onnxruntime openvino pillow numpy`); a peer that
does not start is listed with the reason.

    python benchmarks/served_peers.py [--network-name vit32|vits224] [--network BUNDLE] [--optimized BUNDLE]
        [--quantized GRAPH] [--peers PYTHON] [--rounds 5] [--check]
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peer_services.load import LoadFailed, closed_rate, latencies_ms, require_wrk
from benchmarks.peer_services.networks import NETWORKS, Expected, preprocessing, random_network, write_straight
from benchmarks.peer_services.programs import PEERS, Program, our_programs, peer_program
from benchmarks.peer_services.running import NotStarted
from benchmarks.shared import run_card
from benchmarks.shared.cpu_programs import HAS_BF16
from benchmarks.shared.options import parsed, script_parser
from benchmarks.shared.results import interval
from benchmarks.shared.tables_serving import over_reduced
from gmmvit_deploy.bundle.artifacts import open_bundle
from gmmvit_deploy.measure.statistics import ENOUGH, nearest_rank, ratio

RUNTIMES = ("onnxruntime", "openvino")
REDUCED = ("bf16", "int8")
"""The precisions of peers whose answers are not float32's, in OpenVINO."""
CLIENTS = (1, 16)
KINDS = {"closed": "image", "tensors": "tensor"}
FILES = 16
"""The image files whose answers are checked; the load sends the first."""
OPEN_ROUNDS = 3
_AWAKE_S = 60.0
_SETTLE_S = 5.0

Rates = dict[str, list[float]]
"""Program → answers a second in each round."""
Tried = dict[str, tuple[Program, dict[str, float]]]
"""Service of a peer → (the program, number of clients → answers a second)."""


class Measurement:
    """The programs of a network, running, and the requests that they are sent."""

    def __init__(self, name: str, folder: Path, arguments: argparse.Namespace, stack: ExitStack) -> None:
        self._folder, self._arguments, self._stack = folder, arguments, stack
        self._network = NETWORKS[name]
        self._bundle = open_bundle(arguments.network) if arguments.network else random_network(name, folder)
        self._files = [self._network.file(seed) for seed in range(FILES)]
        self._expected = Expected(self._bundle, self._files)
        self._bodies = {"image": folder / "image", "tensor": folder / "pixels"}
        self._bodies["image"].write_bytes(self._files[0])
        self._bodies["tensor"].write_bytes(self._expected.pixels[0].tobytes())
        self._once_more: list[str] = []  # measurements in which requests failed at first
        self._graph = folder / "straight.onnx"
        write_straight(self._bundle, self._graph)

    def run(self) -> dict[str, Any]:
        tried, missing = self._tried()
        ours = our_programs(self._bundle.path, self._folder, self._stack, label="gmmvit serve")
        for program in ours:
            self._check(program)
        optimized = []
        if self._arguments.optimized:
            optimized = our_programs(
                self._arguments.optimized, self._folder, self._stack, label="gmmvit serve, optimized"
            )
        ours += optimized
        for program in ours:
            program.service.pause()
        result: dict[str, Any] = {
            "network": self._network.title,
            "bundle": self._arguments.network.name if self._arguments.network else "random weights",
            "image_bytes": len(self._files[0]),
            "tried": {name: rates for name, (_, rates) in tried.items()},
            "missing": missing,
        }
        if optimized:
            result["same_class_optimized"] = self._same_class(optimized[0])
        best = {clients: _fastest(tried, clients) for clients in CLIENTS}
        reduced = {clients: _fastest_reduced(tried, clients) for clients in CLIENTS}
        for part, kind in KINDS.items():
            result[part] = {}
            for clients in CLIENTS:
                programs = {program.name: program for program in ours if kind in program.addresses}
                programs |= best[clients] | reduced[clients]
                seconds = self._network.seconds[clients] // (1 if part == "closed" else 2)
                rates = self._rounds(programs, kind, clients, seconds)
                result[part][str(clients)] = _compared(rates, list(best[clients]), list(reduced[clients]))
                _show(f"{part}, {clients} clients", result[part][str(clients)])
        result["once_more"] = self._once_more
        most = str(max(CLIENTS))
        peer = result["closed"][most]["best_peer"]
        programs = {program.name: program for program in ours} | {peer: best[max(CLIENTS)][peer]}
        rate = min(result["closed"][most]["programs"][name]["requests_per_second"] for name in programs) / 2
        result["open"] = self._open(programs, rate)
        return result

    def _same_class(self, program: Program) -> float:
        with _alone(program, "image", self._files[0]):
            answers = [program.ask("image", file) for file in self._files]
        return float(np.mean([self._expected.same_class(number, answer) for number, answer in enumerate(answers)]))

    def _check(self, program: Program) -> None:
        bodies = {"image": self._files, "tensor": [pixels.tobytes() for pixels in self._expected.pixels]}
        for kind in program.addresses:
            for number, body in enumerate(bodies[kind]):
                wrong = self._expected.wrong(number, program.ask(kind, body))
                if wrong:
                    raise SystemExit(f"{program.name}: {wrong}")

    def _tried(self) -> tuple[Tried, dict[str, str]]:
        """Try every service of the peers, and pause those that are the fastest; return (programs, missing → reason)."""
        tried: Tried = {}
        missing: dict[str, str] = {}
        cores = len(os.sched_getaffinity(0))
        settings = dict.fromkeys([(1, cores)] if self._arguments.check else [(1, cores), (cores, 1)])
        runtimes = [*RUNTIMES, *(["openvino:bf16"] if self._arguments.optimized and HAS_BF16 else [])]
        runtimes += ["openvino:int8"] if self._arguments.quantized else []
        for peer in self._arguments.peer or PEERS:
            for runtime in runtimes:
                for workers, threads in settings:
                    name = f"{PEERS[peer]}, {runtime}, {workers} × {threads}"
                    try:
                        tried[name] = self._try(peer, name, runtime=runtime, workers=workers, threads=threads)
                        print(f"{name}: {', '.join(f'{rate:.1f}/s' for rate in tried[name][1].values())}", flush=True)
                    except (NotStarted, LoadFailed) as exc:
                        missing[name] = str(exc)
                        print(f"{name}: missing: {exc}", flush=True)
            _stop_slower(tried)
        if not tried:
            raise SystemExit(f"no peer started: {missing}")
        return tried, missing

    def _try(self, peer: str, name: str, **settings: Any) -> tuple[Program, dict[str, float]]:
        program = peer_program(
            peer,
            name=name,
            python=self._arguments.peers,
            graph=self._arguments.quantized if _reduced(name) == "int8" else self._graph,
            log=self._folder / f"{name}.log",
            image=preprocessing(self._bundle),
            probe=self._files[0],
            **settings,
        )
        self._stack.callback(program.service.stop)
        try:
            if not _reduced(name):
                self._check(program)
            seconds = {count: self._network.seconds[count] // 2 for count in CLIENTS}
            rates = {str(count): self._rate(program, "image", count, seconds[count]) for count in CLIENTS}
        except LoadFailed:
            program.service.stop()
            raise
        program.service.pause()
        return program, rates

    def _rounds(self, programs: Mapping[str, Program], kind: str, clients: int, seconds: int) -> Rates:
        random = np.random.default_rng(clients)
        rates: Rates = {name: [] for name in programs}
        for _ in range(self._arguments.rounds):
            for name in random.permutation(list(programs)):
                rates[name].append(self._rate_alone(programs[name], kind, clients, seconds))
        return rates

    def _rate_alone(self, program: Program, kind: str, clients: int, seconds: int) -> float:
        body = self._bodies[kind].read_bytes()
        with _alone(program, kind, body):
            try:
                return self._rate(program, kind, clients, seconds)
            except LoadFailed as exc:  # under load too, it may replace a worker that it takes for dead
                print(f"{program.name}, once more: {exc}", flush=True)
                self._once_more.append(f"{program.name}, {kind}, {clients} clients")
        with _alone(program, kind, body):
            return self._rate(program, kind, clients, seconds)

    def _rate(self, program: Program, kind: str, clients: int, seconds: int) -> float:
        return closed_rate(program.addresses[kind], self._bodies[kind], clients=clients, seconds=seconds)

    def _open(self, programs: Mapping[str, Program], rate: float) -> dict[str, Any]:
        """Send requests at random times; the rounds of a program together have the requests that a p99 needs."""
        body, count = self._files[0], math.ceil(self._arguments.requests / OPEN_ROUNDS)
        latencies: dict[str, list[float]] = {name: [] for name in programs}
        for number in range(OPEN_ROUNDS):
            for name in np.random.default_rng(number).permutation(list(programs)):
                address = programs[name].addresses["image"]
                with _alone(programs[name], "image", body):
                    latencies[name] += latencies_ms(address, body, rate=rate, requests=count, seed=number)
        rows = {
            name: {"p50_ms": nearest_rank(times, 0.5), "p99_ms": nearest_rank(times, 0.99)}
            for name, times in latencies.items()
        }
        for name, row in rows.items():
            print(
                f"open, {rate:.1f} a second: {name}: p50 {row['p50_ms']:.1f} ms, p99 {row['p99_ms']:.1f} ms", flush=True
            )
        return {"rate": rate, "requests": OPEN_ROUNDS * count, "programs": rows}


@contextmanager
def _alone(program: Program, kind: str, body: bytes) -> Iterator[None]:
    """Let the service of a program run; it has answered what it was asked before, and afterwards.

    A service that was paused for minutes may drop its first connection, or replace a worker that it takes for dead.
    """

    def answers() -> bool:
        try:
            return bool(program.ask(kind, body))
        except LoadFailed:
            return False

    program.service.resume()
    program.service.wait_until(answers, _AWAKE_S)
    time.sleep(_SETTLE_S)
    program.service.wait_until(answers, _AWAKE_S)
    yield
    program.ask(kind, body)
    program.service.pause()


def _stop_slower(tried: Tried) -> None:
    """Stop the services that are the fastest for no number of clients: together, all would need too much memory."""
    kept = {name for clients in CLIENTS for name in _fastest(tried, clients) | _fastest_reduced(tried, clients)}
    for name in tried.keys() - kept:
        tried[name][0].service.stop()


def _fastest(tried: Tried, clients: int) -> dict[str, Program]:
    fastest: dict[str, str] = {}
    for name, (_, rates) in tried.items():
        peer = name.partition(",")[0]
        if _reduced(name):
            continue
        if peer not in fastest or rates[str(clients)] > tried[fastest[peer]][1][str(clients)]:
            fastest[peer] = name
    return {name: tried[name][0] for name in fastest.values()}


def _reduced(name: str) -> str:
    """Return the one of `REDUCED` in which a peer's service computes; "" in float32."""
    return next((precision for precision in REDUCED if f", openvino:{precision}," in name), "")


def _fastest_reduced(tried: Tried, clients: int) -> dict[str, Program]:
    """Return the fastest service of all peers in each precision."""
    fastest: dict[str, str] = {}
    for name in sorted(tried, key=lambda name: tried[name][1][str(clients)]):
        fastest[_reduced(name)] = name
    return {name: tried[name][0] for precision, name in fastest.items() if precision}


def _compared(rates: Rates, peers: list[str], reduced: list[str]) -> dict[str, Any]:
    medians = {name: float(np.median(values)) for name, values in rates.items()}
    best = max(peers, key=lambda name: medians[name])
    rows: dict[str, Any] = {}
    for name, values in rates.items():
        rows[name] = {"requests_per_second": medians[name], "rounds": values}
        if name not in (*peers, *reduced):
            rows[name]["over_best_peer"] = ratio(values, rates[best])
            if "optimized" in name:
                rows[name] |= {f"over_{_reduced(peer)}_peer": ratio(values, rates[peer]) for peer in reduced}
    return {"best_peer": best, "programs": rows}


def _show(title: str, compared: Mapping[str, Any]) -> None:
    for name, row in compared["programs"].items():
        over = f", {interval(row['over_best_peer'])} × {compared['best_peer']}" if "over_best_peer" in row else ""
        over += over_reduced(row)
        print(f"{title}: {name}: {row['requests_per_second']:.1f}/s{over}", flush=True)


def main() -> None:
    parser = script_parser(__doc__, __file__, suffix="")
    parser.add_argument("--network-name", choices=list(NETWORKS), action="append", help="only this network")
    parser.add_argument(
        "--network", type=Path, metavar="BUNDLE", help="bundle of the network that --network-name names"
    )
    parser.add_argument("--optimized", type=Path, metavar="BUNDLE", help="its copy after 'gmmvit optimize'")
    parser.add_argument(
        "--quantized", type=Path, metavar="GRAPH", help="NNCF's .xml of the straight export of --network"
    )
    parser.add_argument("--peers", default=sys.executable, metavar="PYTHON", help="Python with the peers' packages")
    parser.add_argument("--peer", choices=list(PEERS), action="append", help="only this peer; may be repeated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=ENOUGH[0.99], help="requests of a program in open loop")
    arguments = parsed(parser, network_name=["vit32"], peer=["fastapi"], rounds=1, requests=30)
    require_wrk()
    names = arguments.network_name or list(NETWORKS)
    if arguments.network and len(names) != 1:
        parser.error("--network BUNDLE is the bundle of one network: add --network-name")
    if arguments.optimized and not arguments.network:
        parser.error("--optimized BUNDLE is a copy of the bundle of --network, which is missing")
    if arguments.quantized and not arguments.optimized:
        parser.error("--quantized GRAPH is compared with --optimized, which is missing")
    for name in names:
        card = run_card.written(
            arguments.output / f"{name}.json",
            "served_peers.py",
            rounds=arguments.rounds,
            round_s=", ".join(f"{seconds} with {count} clients" for count, seconds in NETWORKS[name].seconds.items()),
            requests_in_open_loop=arguments.requests,
        )
        with card as results, tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            results |= Measurement(name, Path(folder), arguments, stack).run()


if __name__ == "__main__":
    main()
