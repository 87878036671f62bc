"""How far is the queueing model of the capacity plan from servers: one, two and four behind one gateway?

The network is the stand-in that sleeps: two instances that need 20 ms for an image, so a server computes 100 images a
second without the use of a processor. HAProxy with the configuration of `gmmvit serve --gateway` gives requests to the
servers in turn. Clients send requests at random times (Poisson arrivals, the same seeds in every run), open loop.

Two numbers of the model are measured: the capacity of a server (closed loop, 32 clients), and what gateway and client
add to a request (an idle server). Then the script measures mean and 99th percentile of the latency at several
utilisations, and compares them with the model. The model states the latency of a run without an end; at a high
utilisation, a run of some seconds can be far from it by chance. So the script also computes what a queue of these
instances gives with the very arrivals of the run (*same arrivals*), which leaves out the chance of the arrivals.

    python benchmarks/reported/capacity_plan.py [--seconds 20] [--check] [--output RESULT]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shared.open_loop import KEY, closed_loop, http_request, http_sender, open_loop
from benchmarks.shared.options import parsed
from benchmarks.shared.places import result_of
from gmmvit_deploy.bench import run_card
from gmmvit_deploy.manifests.plan import Station, latency
from gmmvit_deploy.serving.gateway.files import gateway_options, write_files
from gmmvit_deploy.serving.gateway.haproxy import HAProxy, find_haproxy
from gmmvit_deploy.serving.gateway.keys import read_keys
from gmmvit_deploy.serving.gateway.models import read_models
from gmmvit_deploy.serving.gateway.options import GatewayFiles, GatewaySettings, Upstream
from gmmvit_deploy.serving.local_http import headers_from_url
from gmmvit_deploy.serving.server import ServerOptions, TritonServer
from tests.serving import sleeping_network

SLEEP_S = 0.02
SERVERS = (1, 2, 4)
UTILISATIONS = (0.5, 0.7, 0.85, 0.93)
DEADLINE_S = 10.0
_LEFT_OUT_S = 1.0
"""The requests of the first second are left out: queues are empty then."""
SETTINGS = {"in_flight": 64, "queue_timeout_ms": 10_000, "queue_limit": 10_000}
"""Nothing is refused, because the model has no refusals."""


@contextmanager
def gateway(servers: Sequence[TritonServer], models: Path, folder: Path) -> Iterator[int]:
    """Run HAProxy in front of servers, and yield its port for HTTP."""
    (folder / "keys").write_text(f"benchmark {KEY}\n", encoding="utf-8")
    settings = GatewaySettings(keys=folder / "keys", **SETTINGS)
    served = read_models(models)
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=512)) for _ in range(3)]
        for listener in listeners:
            os.set_inheritable(listener.fileno(), True)
        upstreams = tuple(
            Upstream(
                name=f"server-{number}",
                http=f"127.0.0.1:{server.http_port}",
                grpc=f"127.0.0.1:{server.grpc_port}",
                metrics=f"127.0.0.1:{server.metrics_port}",
                bundle=served.bundle,
            )
            for number, server in enumerate(servers)
        )
        place = folder / "gateway"
        place.mkdir()
        options = gateway_options(
            settings,
            served,
            models,
            binds={
                name: f"fd@{listener.fileno()}"
                for name, listener in zip(("HTTP", "gRPC", "metrics"), listeners, strict=True)
            },
            upstreams=upstreams,
            files=GatewayFiles(socket=str(place / "admin.sock")),
        )
        config = write_files(place, options, read_keys(settings.keys), "")
        passed = tuple(listener.fileno() for listener in listeners)
        haproxy = HAProxy(
            find_haproxy(), config, socket_path=place / "admin.sock", passed=passed, on_log_line=lambda line: None
        )
        haproxy.start()
        stack.callback(haproxy.stop, 5.0)
        port = listeners[0].getsockname()[1]
        _wait_ready(port)
        yield port


def _wait_ready(port: int) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            headers_from_url(f"http://127.0.0.1:{port}/v2/health/ready", timeout_s=2.0)
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Return times of Poisson arrivals, in seconds."""
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, round(rate * seconds))).tolist()


def queued(due: Sequence[float], station: Station, servers: int) -> dict[str, float]:
    """Return the latency in a computed queue.

    The servers get the requests in turn, and each request takes the instance of its server that is free first. The
    first second is left out, as in `measured`.
    """
    free = [[0.0] * station.instances for _ in range(servers)]
    times = []
    for number, at in enumerate(due):
        instances = free[number % servers]
        first = min(range(station.instances), key=instances.__getitem__)
        instances[first] = max(at, instances[first]) + station.service_s
        if at > _LEFT_OUT_S:
            times.append(instances[first] - at + station.overhead_s)
    return _summary(times)


async def measured(port: int, due: Sequence[float]) -> dict[str, Any]:
    """Send arrivals, and return the latency."""
    send = http_sender("127.0.0.1", port, *http_request(port))
    try:
        outcomes = await open_loop(send, due, deadline_s=DEADLINE_S)
    finally:
        send.close()
    failed = sum(outcome.status != "OK" for outcome in outcomes)
    times = [outcome.seconds for outcome in outcomes if outcome.status == "OK" and outcome.due_s > _LEFT_OUT_S]
    return {
        "requests": len(outcomes),
        "failed": failed,
        **_summary(times),
    }


def _summary(times: Sequence[float]) -> dict[str, float]:
    return {"mean_ms": statistics.fmean(times) * 1000, "p99_ms": float(np.percentile(times, 99)) * 1000}


async def _capacity(port: int) -> float:
    send = http_sender("127.0.0.1", port, *http_request(port))
    try:
        return await closed_loop(send, clients=32, seconds=4.0)
    finally:
        send.close()


def compared(seen: dict[str, Any], due: Sequence[float], station: Station, rate: float, servers: int) -> dict[str, Any]:
    """Return a row: what was seen, what the model and a queue of the same arrivals give, and the model's error."""
    model = latency(station, rate, servers)
    expected = {"mean_ms": model.mean_s * 1000, "p99_ms": model.p99_s * 1000}
    errors = {name: expected[name] / seen[name] - 1 for name in expected}
    return {
        "servers": servers,
        "rate": rate,
        "utilisation": model.utilisation,
        "seen": seen,
        "model": expected,
        "same_arrivals": queued(due, station, servers),
        "error": errors,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--most-servers", type=int, choices=SERVERS, default=max(SERVERS))
    parser.add_argument("--output", type=Path, default=result_of(__file__))
    arguments = parsed(parser, seconds=2.0, most_servers=1)
    card = run_card.written(
        arguments.output, "capacity_plan.py", timed=False, seconds=arguments.seconds, sleep_s=SLEEP_S, **SETTINGS
    )
    counts = [count for count in SERVERS if count <= arguments.most_servers]
    ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
    with card as results, tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        models = sleeping_network.sleeping_repository(Path(temporary) / "models", sleep_s=SLEEP_S)
        servers = [
            stack.enter_context(TritonServer(models, options=ServerOptions(**ports))) for _ in range(max(counts))
        ]
        rows = results["rows"] = []
        for count in counts:
            place = Path(temporary) / f"{count}"
            place.mkdir()
            with gateway(servers[:count], models, place) as port:
                if count == 1:
                    capacity = asyncio.run(_capacity(port))
                    idle = asyncio.run(measured(port, arrivals(5.0, 6.0, seed=0)))
                    service_s = sleeping_network.INSTANCES / capacity
                    station = Station(
                        instances=sleeping_network.INSTANCES,
                        service_s=service_s,
                        overhead_s=max(0.0, idle["mean_ms"] / 1000 - service_s),
                    )
                    results["station"] = {"capacity": capacity, "service_s": service_s, "idle_ms": idle["mean_ms"]}
                for number, utilisation in enumerate(UTILISATIONS):
                    rate = utilisation * count * capacity
                    due = arrivals(rate, arguments.seconds, seed=100 * count + number)
                    seen = asyncio.run(measured(port, due))
                    rows.append(compared(seen, due, station, rate, count))
                    row = rows[-1]
                    print(
                        f"{count} server(s), {rate:.0f}/s ({utilisation:.0%}): mean {seen['mean_ms']:.1f} ms "
                        f"(model {row['error']['mean_ms']:+.0%}), p99 {seen['p99_ms']:.1f} ms "
                        f"(model {row['error']['p99_ms']:+.0%}), failed {seen['failed']}",
                        flush=True,
                    )
        failed = sum(row["seen"]["failed"] for row in rows)
        results["problems"] = [f"{failed} requests failed"] if failed else []


if __name__ == "__main__":
    main()
