"""``gmmvit serve`` as a process of its own, and the processes below it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gmmvit_deploy.serving.processes import Worker, workers_of
from tests.serving.gateways import request
from tests.waiting import wait_until


class Serve:
    """``gmmvit serve`` as a process of its own, which ``with Serve(…) as running:`` kills at its end."""

    def __init__(
        self,
        path: Path | None,
        *arguments: str | Path,
        before: tuple[str, ...] = (sys.executable,),
        log: Path | None = None,
        **how: Any,
    ) -> None:
        """path: what is served; None for a service with a state folder.

        before: a command that runs Python with the arguments that follow.  log: the file to which stderr is appended;
        None for a pipe.  how: as for `subprocess.Popen`.
        """
        command = [*before, "-m", "gmmvit_cli.main", "serve", *([path] if path else []), "--json", *arguments]
        names = ("http", "grpc", "metrics", *(() if "--gateway" in arguments else ("classify",)))
        ports = [part for name in names for part in (f"--{name}-port", "0")]
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with log.open("a") if log else contextlib.nullcontext(subprocess.PIPE) as streams["stderr"]:
            self.process = subprocess.Popen([*command, *ports], **{**streams, **how})
        self.path, self._log = path, log

    def __enter__(self) -> Serve:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def ready(self) -> dict[str, Any]:
        """Wait until the service is ready, and return what it prints.  Errors: SystemExit with the log."""
        try:
            return ready(self.process)
        except SystemExit as error:
            raise SystemExit(f"{error}\n{self._log.read_text() if self._log else ''}") from None

    def kill(self) -> None:
        """Kill the process if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()

    def end(self, timeout_s: float = 30) -> tuple[int, str]:
        """Wait for the end; return (exit status, stderr)."""
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
    return values_in(request(url, "/metrics").body.decode(), name)


def values_in(text: str, name: str) -> dict[str, float]:
    """Return the labels → the value of each sample of a metric in Prometheus' text."""
    samples = [line.rpartition(" ") for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
    return {labels.removeprefix(name): float(value) for labels, _, value in samples}


def stub_of(server: int, model: str) -> Worker:
    """Return the only worker of a model."""
    (worker,) = (worker for worker in workers_of(server) if worker.model == model)
    return worker


def processes_naming(text: str) -> dict[int, str]:
    """Return PID → command line of every live process that has ``text`` in its command line."""
    processes = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue  # the process ended meanwhile
        if text in command and state != "Z":
            processes[int(folder.name)] = command
    return processes


def wait_gone(text: str) -> None:
    """Wait until no live process has ``text`` in its command line."""
    wait_until(lambda: not processes_naming(text), f"the end of all processes of {text}")


def kinds_of(first: int) -> dict[int, str]:
    """Return PID → kind for a process and all processes below it, zombies left out."""
    children: dict[int, list[int]] = {}
    arguments: dict[int, list[str]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # the process ended meanwhile
        if state not in "ZX":
            arguments[int(folder.name)] = command
            children.setdefault(int(parent), []).append(int(folder.name))
    waiting, kinds = [first], {}
    while waiting:
        pid = waiting.pop()
        if pid in arguments:
            kinds[pid] = "gmmvit serve" if pid == first else _kind(arguments[pid])
        waiting += children.get(pid, [])
    return kinds


OWN_MEMORY = ("Pss_Anon:", "Pss_Shmem:", "SwapPss:")
"""The memory of a process without mapped files, whose share changes when another process maps them."""


def memory_mib(pid: int, parts: tuple[str, ...] = OWN_MEMORY) -> float:
    """Return the proportional set size of a process; ``("Pss:",)`` counts all of its parts.  Errors: OSError."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(parts)) / 1024


def _kind(arguments: Sequence[str]) -> str:
    """Return the kind of a process of a service: the program, or the model of a worker, or ``front``, or
    ``large images`` for the decoder of a preprocessing model.

    A worker whose command line is not complete yet, because Triton starts it at this moment, is a ``worker``.
    """
    name = Path(arguments[0]).name
    if name == "triton_python_backend_stub":
        model = next((Path(argument) for argument in arguments if argument.endswith("/model.py")), None)
        return "worker" if model is None else f"worker {model.parents[1].name}"
    if any("serving.front" in argument for argument in arguments):
        return "front"
    if "gmmvit_inference.large_images" in arguments:
        return "large images"
    return name
