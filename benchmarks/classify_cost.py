"""How much throughput does ``POST /classify`` cost? Labels as JSON compared with logits from Triton's own HTTP path.

The network is the paper's ViT d9 with a Gaussian mixture mask (32×32, 10 classes, K = 5, random weights). ``wrk`` sends
PNG files from 1 and from 16 connections, which wait for their answers, to three places of the same server in turn:

    triton     the ensemble over Triton's HTTP, in its raw form; the answer is binary logits
    classify   POST /classify as gmmvit serve offers it on loopback; the answer has labels and probabilities
    gateway    POST /classify behind HAProxy, with a key

``wrk``, the server, HAProxy and the process behind ``/classify`` share the processors.

    python benchmarks/classify_cost.py [--rounds 10] [--check] [--output RESULT]
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gateway_cost import png
from benchmarks.shared import run_card
from benchmarks.shared.open_loop import KEY
from benchmarks.shared.options import parsed, script_parser
from benchmarks.shared.results import interval
from gmmvit_deploy.measure.statistics import ratio
from gmmvit_deploy.serving.front.options import FrontOptions
from gmmvit_deploy.serving.front.process import FrontProcess
from gmmvit_deploy.serving.gateway.options import GatewaySettings
from gmmvit_deploy.serving.repository import repository_from_bundle
from gmmvit_deploy.serving.server import ServerOptions, TritonServer
from gmmvit_deploy.serving.service import Service
from tests.random_bundles import random_bundle

CLIENTS = (1, 16)
MIN_SHARE = 0.75
PLACES = ("triton", "classify", "gateway")


def script_of(folder: Path, place: str, image: Path) -> Path:
    """Write the script with which wrk sends an image to a place."""
    headers = {"Content-Type": "application/octet-stream"}
    if place == "triton":
        headers["Inference-Header-Content-Length"] = "0"
    if place == "gateway":
        headers["Authorization"] = f"Bearer {KEY}"
    lines = [
        f"local file = io.open({json.dumps(str(image))}, 'rb')",
        "wrk.method, wrk.body = 'POST', file:read('*a')",
        *(f"wrk.headers[{json.dumps(name)}] = {json.dumps(value)}" for name, value in headers.items()),
    ]
    path = folder / f"{place}.lua"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def rate(url: str, script: Path, *, clients: int, seconds: float) -> float:
    """Return the answers a second.  Errors: SystemExit when wrk fails, an answer is an error, or none arrives."""
    # wrk takes whole seconds.
    command = ["wrk", "-t1", f"-c{clients}", f"-d{max(1, round(seconds))}", "--timeout", "30", "-s", str(script), url]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    measured = re.search(r"^Requests/sec: +([\d.]+)$", done.stdout, re.MULTILINE)
    if done.returncode or measured is None or "Non-2xx" in done.stdout or "Socket errors" in done.stdout:
        raise SystemExit(f"{' '.join(command)}: {done.stdout}{done.stderr}")
    if not float(measured[1]):
        raise SystemExit(f"{url}: no answer to {clients} clients within {seconds:g} s")
    return float(measured[1])


def rates(urls: dict[str, str], folder: Path, rounds: int, seconds: float) -> dict[int, dict[str, list[float]]]:
    """Return clients → place → requests a second in each round."""
    image = folder / "image.png"
    image.write_bytes(png())
    scripts = {place: script_of(folder, place, image) for place in PLACES}
    measured: dict[int, dict[str, list[float]]] = {n: {place: [] for place in PLACES} for n in CLIENTS}
    generator = np.random.default_rng(0)
    for number in range(rounds + 1):  # the first round is a warm-up
        for clients in CLIENTS:
            for place in map(str, generator.permutation(PLACES)):
                answered = rate(urls[place], scripts[place], clients=clients, seconds=seconds)
                if number or not rounds:
                    measured[clients][place].append(answered)
    return measured


def measured_rows(folder: Path, rounds: int, seconds: float) -> dict[str, Any]:
    """Start a server with a gateway, and beside it the process that answers without a gateway, and measure."""
    (folder / "keys").write_text(f"benchmark {KEY}\n", encoding="utf-8")
    models = repository_from_bundle(random_bundle(folder), folder / "models")
    settings = GatewaySettings(keys=folder / "keys", in_flight=max(CLIENTS), access_log=folder / "access.log")
    with ExitStack() as stack:
        service = stack.enter_context(Service(ServerOptions(http_port=0, grpc_port=0, metrics_port=0), settings))
        server = TritonServer(models.path, options=service.server_options)
        service.start(server, cancelled=lambda: False)
        front = stack.enter_context(FrontProcess(FrontOptions(triton_url=server.http_url), None))
        front.wait_ready()
        urls = {
            "triton": f"{server.http_url}/v2/models/gmmvit/infer",
            "classify": front.classify_url,
            "gateway": str(service.classify_url),
        }
        measured = rates(urls, folder, rounds, seconds)
    return {
        f"{clients} clients": {
            "requests_per_second": {place: float(np.median(values)) for place, values in places.items()},
            "share": {place: ratio(places[place], places["triton"]) for place in PLACES[1:]},
            "rounds": places,
        }
        for clients, places in measured.items()
    }


def main() -> None:
    parser = script_parser(__doc__, __file__)
    parser.add_argument("--rounds", type=int, default=10, help="0 measures the warm-up")
    parser.add_argument("--seconds", type=float, default=5.0, help="time of each measurement in a round, whole seconds")
    arguments = parsed(parser, rounds=0, seconds=3.0)
    if shutil.which("wrk") is None:
        raise SystemExit("wrk is not installed\nhint: apt-get install wrk")
    card = run_card.written(arguments.output, "classify_cost.py", rounds=arguments.rounds, round_s=arguments.seconds)
    with card as results, tempfile.TemporaryDirectory() as temporary:
        rows = results["rows"] = measured_rows(Path(temporary), arguments.rounds, arguments.seconds)
        most = f"{max(CLIENTS)} clients"
        share = rows[most]["share"]["classify"].value
        missed = [f"{most}: /classify has {share:.0%} of Triton's own rate, expected {MIN_SHARE:.0%}"]
        results["problems"] = missed if share < MIN_SHARE else []
        for name, row in rows.items():
            for place, relative in row["share"].items():
                per_second = row["requests_per_second"]
                print(
                    f"{name}: {place} {per_second[place]:,.0f}/s, Triton's own path {per_second['triton']:,.0f}/s: "
                    f"{interval(relative)}"
                )


if __name__ == "__main__":
    main()
