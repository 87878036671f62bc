"""Looking for processes that a server left behind."""

from __future__ import annotations

import time
from pathlib import Path


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


def wait_gone(text: str, *, timeout_s: float = 10.0) -> dict[int, str]:
    """Wait for these processes to end, and return those that remain, in the form of `processes_naming`."""
    deadline = time.monotonic() + timeout_s
    while (left := processes_naming(text)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left
