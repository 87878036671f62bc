"""Run commands of gmmvit on hostile files, in processes forked from a server that has imported the common modules."""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.hostile.case import ANSWERED, CRASH, HANG, REFUSED, Outcome

__all__ = ["Sandbox", "gmmvit"]

_PRELOADED = (
    "torch",
    "torch.onnx",
    "onnx",
    "onnxscript",
    "onnxruntime",
    "PIL.Image",
    "gmmvit_cli.main",
    "tests.hostile.bundles",
    "tests.hostile.senders",
)
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


def gmmvit(arguments: list[str], sandbox: Sandbox, *, timeout_s: float) -> tuple[Outcome, int]:
    """Run a command.  Return (outcome, largest resident memory in bytes); the memory of a killed command is 0."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    outputs = sandbox.root.with_name("stdout"), sandbox.root.with_name("stderr"), sandbox.root.with_name("peak")
    for path in outputs:
        path.unlink(missing_ok=True)
    process = context.Process(target=_run, args=(arguments, outputs, sandbox.environment(), sandbox.here))
    started = time.monotonic()
    process.start()
    process.join(timeout_s)
    seconds = time.monotonic() - started
    if process.exitcode is None:
        process.kill()
        process.join()
        return Outcome(HANG, f"no answer within {timeout_s:g} s", seconds), 0
    errors = outputs[1].read_text(errors="replace") if outputs[1].exists() else ""
    peak = int(outputs[2].read_text()) if outputs[2].exists() else 0
    return Outcome(_answer(process.exitcode, errors), _reason(errors), seconds), peak


def _answer(status: int | None, errors: str) -> str:
    if status == 0:
        return ANSWERED
    if status != 1 or "Traceback" in errors or _reason(errors).startswith("Error: unexpected "):
        return CRASH
    return REFUSED


def _reason(errors: str) -> str:
    lines = [line for line in errors.splitlines() if line.startswith("Error:")] or errors.splitlines()[-1:]
    return lines[0][:200] if lines else ""


def _run(arguments: list[str], outputs: tuple[Path, Path, Path], settings: dict[str, str], here: Path) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_BYTES, _ADDRESS_BYTES))
    for number, path in enumerate(outputs[:2], start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(settings)
    os.chdir(here)
    sys.argv = ["gmmvit", *arguments]
    from gmmvit_cli.main import main

    try:
        main()
    finally:
        outputs[2].write_text(str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))
