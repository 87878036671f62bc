"""How much time and throughput does the gateway cost? Triton directly compared with Triton behind HAProxy.

The network is the small golden ViT with Gaussian mixture masks (32×32), which answers faster than any real network, so
the share of the gateway is as large as it can be. The clients send single images in raw bytes, wait for their answers,
and share the processors with Triton and HAProxy. In the rows *classify*, an image is a PNG file: directly, it goes to
the ensemble over gRPC, and through the gateway to ``POST /classify``, whose answer has labels.

    python benchmarks/gateway_cost.py [--rounds 10] [--check] [--output RESULT]
"""

from __future__ import annotations

import asyncio
import io
import struct
import tempfile
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
from PIL import Image
from tritonclient.grpc import service_pb2

from benchmarks.shared import run_card
from benchmarks.shared.open_loop import KEY, Send, closed_loop, grpc_sender, http_request, http_sender, message
from benchmarks.shared.options import parsed, script_parser
from benchmarks.shared.places import ROOT
from gmmvit_deploy.exporting.bundle_from_checkpoint import ExportOptions, bundle_from_checkpoint
from gmmvit_deploy.images.datasets import DATASETS
from gmmvit_deploy.measure.statistics import ratio
from gmmvit_deploy.serving.gateway.gateway import Gateway
from gmmvit_deploy.serving.gateway.options import GatewaySettings
from gmmvit_deploy.serving.repository import repository_from_bundle
from gmmvit_deploy.serving.server import ServerOptions, TritonServer
from gmmvit_deploy.serving.service import Service

CLIENTS = (1, 16)
MAX_MS, MIN_SHARE = 0.5, 0.75
PLACES = ("direct", "gateway")


def png() -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


def image_message() -> bytes:
    """Return a serialised request of the ensemble with an image."""
    request = service_pb2.ModelInferRequest(model_name="gmmvit")
    request.inputs.add(name="IMAGE", datatype="BYTES", shape=[1, 1])
    request.outputs.add(name="logits")
    request.raw_input_contents.append(struct.pack("<I", len(png())) + png())
    return bytes(request.SerializeToString())


def classify_request() -> tuple[bytes, bytes]:
    """Return (head, body) of ``POST /classify`` with an image."""
    lines = ["POST /classify HTTP/1.1", "Host: 127.0.0.1", f"Authorization: Bearer {KEY}"]
    lines += ["Content-Type: image/png", f"Content-Length: {len(png())}"]
    return "\r\n".join([*lines, "", ""]).encode(), png()


async def rates(
    direct: TritonServer, gateway: Gateway, rounds: int, seconds: float
) -> dict[str, dict[str, list[float]]]:
    """Return ``PROTOCOL, N clients`` → place → requests a second in each round."""
    async with AsyncExitStack() as stack:
        senders: dict[tuple[str, str], Send] = {}
        for name, where in (("direct", direct), ("gateway", gateway)):
            address, options = f"127.0.0.1:{where.grpc_port}", [("grpc.enable_http_proxy", 0)]
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(address, options=options))
            senders["grpc", name] = grpc_sender(channel, message(), (("authorization", f"Bearer {KEY}"),))
            over_http = http_sender("127.0.0.1", where.http_port, *http_request(where.http_port))
            stack.callback(over_http.close)
            senders["http", name] = over_http
            if name == "direct":
                senders["classify", name] = grpc_sender(channel, image_message(), ())
        classify = http_sender("127.0.0.1", gateway.http_port, *classify_request())
        stack.callback(classify.close)
        senders["classify", "gateway"] = classify
        measured: dict[str, dict[str, list[float]]] = {}
        generator = np.random.default_rng(0)
        for number in range(rounds + 1):  # the first round is a warm-up
            for protocol in ("grpc", "http", "classify"):
                for clients in CLIENTS:
                    row = measured.setdefault(f"{protocol}, {clients} clients", {place: [] for place in PLACES})
                    for place in generator.permutation(PLACES):
                        rate = await closed_loop(senders[protocol, str(place)], clients=clients, seconds=seconds)
                        if number or not rounds:
                            row[str(place)].append(rate)
    return measured


def described(measured: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for name, places in measured.items():
        clients = int(name.split()[1])
        # With a closed loop, clients / rate is the mean time of a request.
        costs = [1000 * clients * (1 / b - 1 / a) for a, b in zip(places["direct"], places["gateway"], strict=True)]
        rows[name] = {
            "requests_per_second": {place: float(np.median(values)) for place, values in places.items()},
            "share": ratio(places["gateway"], places["direct"]),
            "cost_ms": {"median": float(np.median(costs)), "lowest": min(costs), "highest": max(costs)},
            "rounds": places,
        }
    return rows


def problems(rows: dict[str, Any]) -> list[str]:
    """Return what is promised and not kept: the cost for a single client, the share for the most clients."""
    reasons = []
    for name, row in rows.items():
        if name.startswith("classify"):
            continue  # another task than the ensemble's: a process of Python answers with labels
        cost, share = row["cost_ms"]["median"], row["share"].value
        if " 1 clients" in name and cost > MAX_MS:
            reasons.append(f"{name}: {cost:.2f} ms a request, expected at most {MAX_MS} ms")
        if f" {max(CLIENTS)} clients" in name and share < MIN_SHARE:
            reasons.append(f"{name}: {share:.0%} of the throughput, expected {MIN_SHARE:.0%}")
    return reasons


def measured_rows(folder: Path, rounds: int, seconds: float) -> dict[str, Any]:
    """Start server and gateway, and measure."""
    with ExitStack() as stack:
        cifar10 = DATASETS["cifar10"]
        options = ExportOptions(mean=cifar10.mean, std=cifar10.std, labels=cifar10.labels)
        checkpoint = ROOT / "tests" / "golden" / "vit_gmm.pth"
        bundle = bundle_from_checkpoint(checkpoint, folder / "bundle", options)
        models = repository_from_bundle(bundle, folder / "models")
        (folder / "keys").write_text(f"benchmark {KEY}\n", encoding="utf-8")
        ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
        settings = GatewaySettings(keys=folder / "keys", in_flight=32, access_log=folder / "access.log")
        service = stack.enter_context(Service(ServerOptions(**ports), settings))
        server = TritonServer(models.path, options=service.server_options)
        service.start(server, cancelled=lambda: False)
        return described(asyncio.run(rates(server, service.gateway, rounds, seconds)))


def main() -> None:
    parser = script_parser(__doc__, __file__)
    parser.add_argument("--rounds", type=int, default=10, help="0 measures the warm-up")
    parser.add_argument("--seconds", type=float, default=1.0, help="time of each measurement in a round")
    arguments = parsed(parser, rounds=0, seconds=0.2)
    card = run_card.written(arguments.output, "gateway_cost.py", rounds=arguments.rounds, round_s=arguments.seconds)
    with card as results, tempfile.TemporaryDirectory() as temporary:
        rows = results["rows"] = measured_rows(Path(temporary), arguments.rounds, arguments.seconds)
        results["problems"] = problems(rows)
        for name, row in rows.items():
            rate = row["requests_per_second"]
            print(
                f"{name}: {rate['direct']:,.0f}/s directly, {rate['gateway']:,.0f}/s through the gateway: "
                f"{row['share'].value:.0%}, {row['cost_ms']['median']:+.2f} ms a request"
            )
        print("\n".join(f"PROBLEM: {reason}" for reason in results["problems"]))


if __name__ == "__main__":
    main()
