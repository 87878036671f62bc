"""What do clients get at three times the capacity of the server, directly from Triton and through the gateway?

The network is a stand-in with two instances that sleep 20 ms for an image: 100 images a second, without the use of a
processor. Clients send single images at fixed times (open loop), and give up after 0.5 s. After the capacity (closed
loop, 32 clients, no gateway) follow 300 requests a second for some seconds, and at once half of the capacity: after how
many seconds does no request fail any more?

The gateway (HAProxy) passes at most 16 requests at a time to Triton; others wait for at most 250 ms, and are then
refused with 503 and Retry-After, or RESOURCE_EXHAUSTED.

    python benchmarks/overload.py [--seconds 12] [--check] [--output RESULT]
"""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc.aio

from benchmarks.shared import run_card
from benchmarks.shared.open_loop import (
    KEY,
    Send,
    closed_loop,
    grpc_sender,
    http_request,
    http_sender,
    message,
    open_loop,
    summary,
)
from benchmarks.shared.options import parsed, script_parser
from gmmvit_deploy.serving.gateway.gateway import Gateway
from gmmvit_deploy.serving.gateway.options import GatewaySettings
from gmmvit_deploy.serving.server import ServerOptions, TritonServer
from gmmvit_deploy.serving.service import Service
from tests.serving import stand_in

SLEEP_S = 0.02
CAPACITY = stand_in.INSTANCES / SLEEP_S
OVERLOAD = 3
PROTOCOLS = ("grpc", "http")
DEADLINE_S = 0.5
IN_FLIGHT, QUEUE_TIMEOUT_MS = 16, 250
BOUND_MS = QUEUE_TIMEOUT_MS + 100
"""The bound of a refusal: the timeout of the queue, and what a busy machine adds."""
SHARE = 0.9
RECOVERY_S, AFTER_S = 1.0, 5.0


async def phases(send: Send, seconds: float) -> dict[str, Any]:
    """Overload for some seconds, then half of the capacity.

    recovered_s: from the end of the overload until the last request was due that got no answer in time.
    """
    rate, later = OVERLOAD * CAPACITY, CAPACITY / 2
    due = [number / rate for number in range(round(rate * seconds))]
    due += [seconds + number / later for number in range(round(later * AFTER_S))]
    outcomes = await open_loop(send, due, deadline_s=DEADLINE_S)
    over = [outcome for outcome in outcomes if outcome.due_s < seconds]
    after = outcomes[len(over) :]
    return {
        "overload": summary(over, seconds=seconds),
        "after": summary(after, seconds=AFTER_S),
        "recovered_s": max((outcome.due_s - seconds for outcome in after if outcome.status != "OK"), default=0.0),
    }


async def measured(where: TritonServer | Gateway, protocol: str, seconds: float, *, closed: bool) -> dict[str, Any]:
    result: dict[str, Any] = {}
    if protocol == "grpc":
        options = [("grpc.enable_http_proxy", 0)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{where.grpc_port}", options=options) as channel:
            send = grpc_sender(channel, message(), (("authorization", f"Bearer {KEY}"),))
            if closed:
                result["capacity_per_second"] = await closed_loop(send, clients=32, seconds=3.0)
            return {**result, **await phases(send, seconds)}
    sender = http_sender("127.0.0.1", where.http_port, *http_request(where.http_port))
    if closed:
        result["capacity_per_second"] = await closed_loop(sender, clients=32, seconds=3.0)
    try:
        return {**result, **await phases(sender, seconds)}
    finally:
        sender.close()


def row_of(place: str, protocol: str, seconds: float, folder: Path) -> dict[str, Any]:
    """Start a new server, so that no request of another row waits in it, and a gateway for the place ``gateway``."""
    models = folder / f"{protocol}-{place}"
    stand_in.sleeping_repository(models, sleep_s=SLEEP_S)
    (folder / "keys").write_text(f"benchmark {KEY}\n", encoding="utf-8")
    ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
    chosen = {"in_flight": IN_FLIGHT, "queue_timeout_ms": QUEUE_TIMEOUT_MS}
    with ExitStack() as stack:
        if place == "direct":
            server = stack.enter_context(TritonServer(models, options=ServerOptions(**ports)))
            return asyncio.run(measured(server, protocol, seconds, closed=True))
        settings = GatewaySettings(keys=folder / "keys", access_log=folder / "access.log", **chosen)
        service = stack.enter_context(Service(ServerOptions(**ports), settings))
        service.start(TritonServer(models, options=service.server_options), cancelled=lambda: False)
        return asyncio.run(measured(service.gateway, protocol, seconds, closed=False))


def problems(row: dict[str, Any], capacity: float) -> list[str]:
    """Return what the gateway promises and did not keep in this row."""
    over, reasons = row["overload"], []
    if over["answered_per_second"] < SHARE * capacity:
        reasons.append(f"answered {over['answered_per_second']:.1f}/s, expected {SHARE:.0%} of {capacity:.1f}/s")
    others = set(over["statuses"]) - {"OK", "503", "RESOURCE_EXHAUSTED"}
    if others:
        reasons.append(f"neither answered nor refused: {', '.join(sorted(others))}")
    if over["slowest_refusal_ms"] > BOUND_MS:
        reasons.append(f"a refusal took {over['slowest_refusal_ms']:.0f} ms, expected at most {BOUND_MS} ms")
    if row["recovered_s"] > RECOVERY_S:
        reasons.append(f"recovered after {row['recovered_s']:.2f} s, expected {RECOVERY_S:g} s")
    return reasons


def main() -> None:
    parser = script_parser(__doc__, __file__)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--protocol", choices=PROTOCOLS, action="append", help="only this protocol; may be repeated")
    arguments = parsed(parser, seconds=1.0, protocol=["grpc"])
    settings = {"in_flight": IN_FLIGHT, "queue_timeout_ms": QUEUE_TIMEOUT_MS, "deadline_s": DEADLINE_S}
    card = run_card.written(
        arguments.output, "overload.py", timed=False, seconds=arguments.seconds, overload=OVERLOAD, **settings
    )
    with card as results, tempfile.TemporaryDirectory() as temporary:
        for protocol in arguments.protocol or PROTOCOLS:
            rows = results[protocol] = {
                place: row_of(place, protocol, arguments.seconds, Path(temporary)) for place in ("direct", "gateway")
            }
            capacity = rows["direct"]["capacity_per_second"]
            rows["gateway"]["problems"] = problems(rows["gateway"], capacity)
            print(f"{protocol}: capacity {capacity:.1f}/s")
            for place, row in rows.items():
                over = row["overload"]
                print(
                    f"{protocol}, {place}: {over['answered_per_second']:.1f}/s answered in time, "
                    f"{over['statuses']}, slowest refusal {over['slowest_refusal_ms']:.0f} ms, "
                    f"recovered after {row['recovered_s']:.2f} s"
                )
            print("\n".join(f"{protocol}: PROBLEM: {reason}" for reason in rows["gateway"]["problems"]))


if __name__ == "__main__":
    main()
