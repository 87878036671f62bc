"""``gmmvit serve`` as a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from gmmvit_deploy.serving.processes import Worker, workers_of


class Serve:
    """``gmmvit serve`` as a process of its own."""

    def __init__(
        self, path: Path | None, *arguments: str | Path, before: tuple[str, ...] = (sys.executable,), **how: Any
    ) -> None:
        """path: what is served; None for a service with a state folder.

        before: a command that runs Python with the arguments that follow.  how: as for `subprocess.Popen`.
        """
        command = [*before, "-m", "gmmvit_cli.main", "serve", *([path] if path else []), "--json", *arguments]
        names = ("http", "grpc", "metrics", *(() if "--gateway" in arguments else ("classify",)))
        ports = [part for name in names for part in (f"--{name}-port", "0")]
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([*command, *ports], **{**streams, **how})
        self.path = path

    def ready(self) -> dict[str, Any]:
        return ready(self.process)

    def end(self, timeout_s: float = 30) -> tuple[int, str]:
        """(exit status, stderr)"""
        _, errors = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, errors


def ready(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait until a service is ready, and return what it prints, such as its addresses."""
    text = ""
    for line in process.stdout or ():
        text += line
        if line.startswith("}"):
            return json.loads(text)
    raise SystemExit(f"gmmvit serve did not start: {process.communicate()}")


def metric_values(url: str, name: str) -> dict[str, float]:
    """Return the labels → the value of each sample of a metric at a Prometheus endpoint."""
    with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 - the URL that the server printed
        lines = answer.read().decode().splitlines()
    samples = [line.rpartition(" ") for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
    return {labels.removeprefix(name): float(value) for labels, _, value in samples}


def stub_of(server: int, model: str) -> Worker:
    """Return the only worker of a model."""
    (worker,) = (worker for worker in workers_of(server) if worker.model == model)
    return worker
