"""Run the command line in a process forked from a server that has imported the common modules: 3 s faster each time.

Tests of the start and end of a process (signals, closed pipes, limits) use a new interpreter.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

_PRELOADED = (
    "tests.forked",
    "torch",
    "torch.onnx",
    "onnx",
    "onnxscript",
    "onnxscript.function_libs.torch_lib.ops",
    "torch.onnx._internal.exporter._compat",
    "onnxruntime",
    "PIL.Image",
    "gmmvit_cli.main",
)

_TRACEBACK_S = 2
"""The time that a late command gets to print where its threads are."""


def command_line(
    arguments: list[str],
    *,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    address_bytes: int | None = None,
    preloaded: tuple[str, ...] = (),
) -> subprocess.CompletedProcess[str]:
    """Return status, stdout and stderr of ``gmmvit``.

    environment, folder: the variables and the current folder of the command; by default, those of this process.
    address_bytes: the largest address space.  preloaded: more modules for the server to import.
    Errors: TimeoutExpired, with what the command has printed and where its threads were.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOADED, *preloaded])
    with tempfile.TemporaryDirectory() as outputs:
        paths = Path(outputs) / "stdout", Path(outputs) / "stderr"
        settings = dict(os.environ if environment is None else environment)
        process = context.Process(
            target=_run, args=(arguments, timeout_s, paths, settings, folder or Path.cwd(), address_bytes)
        )
        process.start()
        process.join(timeout_s)
        if late := process.exitcode is None:
            process.join(_TRACEBACK_S)
            process.kill()
            process.join()
        output, errors = (path.read_text(errors="replace") if path.exists() else "" for path in paths)
        if late:
            expired = subprocess.TimeoutExpired(["gmmvit", *arguments], timeout_s)
            expired.add_note(f"stdout: {output}\nstderr: {errors}")
            raise expired
    return subprocess.CompletedProcess(["gmmvit", *arguments], process.exitcode, output, errors)


def _run(
    arguments: list[str],
    timeout_s: float,
    outputs: tuple[Path, Path],
    settings: dict[str, str],
    cwd: Path,
    address_bytes: int | None,
) -> None:
    if address_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (address_bytes, address_bytes))
    for number, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    faulthandler.dump_traceback_later(timeout_s, file=2)
    os.environ.clear()
    os.environ.update(settings)
    os.chdir(cwd)
    sys.argv = ["gmmvit", *arguments]
    gc.freeze()  # collections look through no object of the preloaded modules
    from gmmvit_cli.main import main

    main()
