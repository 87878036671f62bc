"""Ask a service: a single request, clients that wait for their answers (wrk), and requests at random times."""

from __future__ import annotations

import asyncio
import http.client
import json
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.shared.open_loop import Outcome, http_sender, open_loop

_SCRIPT = Path(__file__).with_name("post.lua")
_DEADLINE_S = 30.0


class LoadFailed(SystemExit):
    """A request was refused, failed or not answered.  Where nothing catches it, the script ends with its message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where images are posted to.  headers: the headers of a request, besides the length of its body."""

    port: int
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)


def require_wrk() -> None:
    """Errors: SystemExit when wrk is not installed."""
    if shutil.which("wrk") is None:
        raise SystemExit("Error: the load comes from wrk, which is not installed\nhint: apt-get install wrk")


def post(address: Address, body: bytes) -> tuple[int, Mapping[str, str], bytes]:
    """Send a request; return (status, headers in lower case, body).  Errors: OSError, http.client.HTTPException."""
    connection = http.client.HTTPConnection("127.0.0.1", address.port, timeout=_DEADLINE_S)
    try:
        connection.request("POST", address.path, body, dict(address.headers))
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def closed_rate(address: Address, body: Path, *, clients: int, seconds: int) -> float:
    """Return the answers a second of ``clients`` that post the file ``body`` and wait for each answer.  Errors:
    LoadFailed.
    """
    headers = [part for name, value in address.headers.items() for part in ("-H", f"{name}: {value}")]
    settings = ["-t1", f"-c{clients}", f"-d{seconds}s", "--timeout", f"{_DEADLINE_S:.0f}s", *headers]
    url = f"http://127.0.0.1:{address.port}{address.path}"
    command = ["wrk", *settings, "-s", str(_SCRIPT), url, "--", str(body)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    counted = json.loads(lines[-1]) if lines else {"answers": 0, "failed": 0}
    if counted["failed"] or not counted["answers"]:
        raise LoadFailed(f"{url}: {counted['answers']} answers, {counted['failed']} failed requests\n{done.stderr}")
    return float(counted["answers"] / counted["seconds"])


def latencies_ms(address: Address, body: bytes, *, rate: float, requests: int, seed: int) -> list[float]:
    """Return the latencies of Poisson arrivals, ``rate`` a second, from the time each was due.  Errors: LoadFailed."""
    due = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, requests)).tolist()
    lines = [f"POST {address.path} HTTP/1.1", f"Host: 127.0.0.1:{address.port}"]
    lines += [f"{name}: {value}" for name, value in {**address.headers, "Content-Length": len(body)}.items()]
    send = http_sender("127.0.0.1", address.port, "\r\n".join([*lines, "", ""]).encode(), body)

    async def sent() -> list[Outcome]:
        try:
            return await open_loop(send, due, deadline_s=_DEADLINE_S)
        finally:
            send.close()

    outcomes = asyncio.run(sent())
    failed = {outcome.status for outcome in outcomes} - {"OK"}
    if failed:
        raise LoadFailed(f"port {address.port}{address.path}: at {rate:.1f} requests a second: {', '.join(failed)}")
    return [1000 * outcome.seconds for outcome in outcomes]
