"""The processes of a service, and processes that a server left behind."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.waiting import wait_until


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


def _kind(arguments: Sequence[str]) -> str:
    """Return the kind of a process of a service: the program, or the model of a worker, or ``front``.

    A worker whose command line is not complete yet, because Triton starts it at this moment, is a ``worker``.
    """
    name = Path(arguments[0]).name
    if name == "triton_python_backend_stub":
        model = next((Path(argument) for argument in arguments if argument.endswith("/model.py")), None)
        return "worker" if model is None else f"worker {model.parents[1].name}"
    if any("serving.front" in argument for argument in arguments):
        return "front"
    return name
