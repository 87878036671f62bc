"""Start the services that are compared: each peer's, and `gmmvit serve`."""

from __future__ import annotations

import json
import os
import struct
import subprocess
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from benchmarks.peer_services.load import Address, LoadFailed, post
from benchmarks.peer_services.running import Service
from benchmarks.shared.places import BENCHMARKS
from gmmvit_deploy.serving.ports import free_ports
from tests.serving.commands import Serve

PEERS = {"fastapi": "FastAPI", "litserve": "LitServe", "bentoml": "BentoML", "ray": "Ray Serve", "mosec": "mosec"}
"""Name of a file in this folder, without ``_service.py`` → the peer's name."""
MAX_BATCH = 16
_START_S = 120.0
_FOLDER = BENCHMARKS / "peer_services"
_BYTES = {"Content-Type": "application/octet-stream"}

Answer = dict[int, float]
"""Class → its probability, for the most probable classes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A way to ask a service.

    addresses: ``image`` and, if pixels are taken, ``tensor`` → address.  read: reads an answer from its headers and
    body.
    """

    name: str
    service: Service
    addresses: Mapping[str, Address]
    read: Callable[[Mapping[str, str], bytes], Answer]

    def ask(self, kind: str, body: bytes) -> Answer:
        """Errors: LoadFailed when the answer is a refusal."""
        status, headers, text = post(self.addresses[kind], body)
        if status != 200:
            raise LoadFailed(f"{self.name}: status {status}: {text[:200].decode(errors='replace')}")
        return self.read(headers, text)


def peer_program(
    peer: str,
    *,
    name: str,
    python: str,
    graph: Path,
    log: Path,
    runtime: str,
    workers: int,
    threads: int,
    image: Mapping[str, Any],
    probe: bytes,
) -> Program:
    """Start the service of a key of `PEERS` with its own Python, and wait until it answers.  Errors: NotStarted."""
    (port,) = free_ports({"HTTP": ("127.0.0.1", 0)})
    settings = {"graph": str(graph), "runtime": runtime, "workers": workers, "threads": threads, "port": port}
    settings |= {"batch": MAX_BATCH, "image": image}
    command = [python, f"{peer}_service.py"]
    if peer == "bentoml":
        command = [python, "-m", "bentoml", "serve", "bentoml_service:ImageClassifier", "--port", str(port)]
    environment = {"PEER_SERVICE": json.dumps(settings), "MOSEC_PORT": str(port), "MOSEC_ADDRESS": "127.0.0.1"}
    environment |= {"OMP_NUM_THREADS": str(threads), "PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"}
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=_FOLDER,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    service = Service(process, log)
    content = "image/png" if probe.startswith(b"\x89PNG") else "image/jpeg"
    address = Address(port=port, path="/classify", headers={"Content-Type": content} if peer == "bentoml" else _BYTES)
    try:
        service.wait_until(lambda: post(address, probe)[0] == 200, _START_S)
    except BaseException:
        service.stop()
        raise
    return Program(name=name, service=service, addresses={"image": address, "tensor": address}, read=_from_peer)


def our_programs(bundle: Path, folder: Path, stack: ExitStack, *, label: str) -> list[Program]:
    """Start ``gmmvit serve BUNDLE``; return its ways of being asked.  label: stands in their names."""
    log = folder / f"{label}.log"
    serve = Serve(bundle, log=log, start_new_session=True)
    service = Service(serve.process, log)
    stack.callback(service.stop)
    where = serve.ready()
    port, classify_port = (int(urlsplit(where[name]).port or 0) for name in ("http", "classify"))
    raw = {**_BYTES, "Inference-Header-Content-Length": "0"}
    triton = {
        "image": Address(port=port, path="/v2/models/gmmvit/infer", headers=raw),
        "tensor": Address(port=port, path="/v2/models/gmmvit_network/infer", headers=raw),
    }
    classify = {"image": Address(port=classify_port, path="/classify", headers=_BYTES)}
    return [
        Program(name=f"{label}: Triton's path", service=service, addresses=triton, read=_from_triton),
        Program(name=f"{label}: /classify", service=service, addresses=classify, read=_from_classify),
    ]


def _from_peer(headers: Mapping[str, str], body: bytes) -> Answer:
    answer = json.loads(body)
    return dict(zip(answer["index"], answer["probability"], strict=True))


def _from_triton(headers: Mapping[str, str], body: bytes) -> Answer:
    tensor = body[int(headers["inference-header-content-length"]) :]
    logits = np.array(struct.unpack(f"<{len(tensor) // 4}f", tensor))
    shares = np.exp(logits - logits.max())
    return dict(enumerate((shares / shares.sum()).tolist()))


def _from_classify(headers: Mapping[str, str], body: bytes) -> Answer:
    return {guess["index"]: guess["probability"] for guess in json.loads(body)["predictions"][0]}
