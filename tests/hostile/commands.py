"""Run commands of gmmvit on hostile files, each in folders of its own and with a limit on its memory."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from tests.forked import command_line
from tests.hostile.case import ANSWERED, CRASH, HANG, REFUSED, Outcome

_ADDRESS_BYTES = 24 << 30
"""The largest address space of a command, so that a bomb cannot take the machine with it; torch reserves some GB."""


@dataclass(frozen=True, slots=True)
class Sandbox:
    """The folders of a command: the current folder, the home folder and the temporary folder."""

    root: Path

    def __post_init__(self) -> None:
        for folder in (self.here, self.home, self.temporary):
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def here(self) -> Path:
        return self.root / "here"

    @property
    def home(self) -> Path:
        return self.root / "home"

    @property
    def temporary(self) -> Path:
        return self.root / "tmp"

    def environment(self) -> dict[str, str]:
        """Return the environment variables of a command."""
        folders = {"HOME": str(self.home), "TMPDIR": str(self.temporary)}
        return {**os.environ, **folders, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}

    def files(self) -> set[str]:
        """Return the paths of all files and folders."""
        return {str(path) for path in self.root.rglob("*")}


def gmmvit(arguments: list[str], sandbox: Sandbox, *, timeout_s: float) -> Outcome:
    """Run a command in the sandbox."""
    started = time.monotonic()
    try:
        done = command_line(
            arguments,
            timeout_s=timeout_s,
            environment=sandbox.environment(),
            folder=sandbox.here,
            address_bytes=_ADDRESS_BYTES,
            preloaded=("tests.hostile.bundles",),
        )
    except subprocess.TimeoutExpired:
        return Outcome(HANG, f"no answer within {timeout_s:g} s", time.monotonic() - started)
    return Outcome(_answer(done.returncode, done.stderr), _reason(done.stderr), time.monotonic() - started)


def _answer(status: int | None, errors: str) -> str:
    if status == 0:
        return ANSWERED
    if status != 1 or "Traceback" in errors or _reason(errors).startswith("Error: unexpected "):
        return CRASH
    return REFUSED


def _reason(errors: str) -> str:
    lines = [line for line in errors.splitlines() if line.startswith("Error:")] or errors.splitlines()[-1:]
    return lines[0][:200] if lines else ""
