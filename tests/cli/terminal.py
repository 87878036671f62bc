"""Run the command line in this process: fast enough to try every command with every mistake."""

from __future__ import annotations

import contextlib
import io
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from gmmvit_cli.main import main
from gmmvit_cli.progress import LINE_MARK

Gmmvit = Callable[..., "subprocess.CompletedProcess[str]"]
"""The fixture ``gmmvit``."""


class Answer(NamedTuple):
    status: int
    out: str
    err: str


def gmmvit_here(*arguments: str | Path, columns: int = 80) -> Answer:
    """Return status, stdout and stderr of ``gmmvit ARGUMENTS`` on a terminal of this width."""
    out, err = io.StringIO(), io.StringIO()
    before = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["gmmvit", *map(str, arguments)])
        patch.setenv("COLUMNS", str(columns))
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as end:
                main()
        finally:
            signal.signal(signal.SIGTERM, before)
    return Answer(int(end.value.code or 0), out.getvalue(), err.getvalue())


def without_progress(stderr: str) -> str:
    """Return stderr without the lines of progress, whose number depends on how fast the machine is."""
    return "".join(line for line in stderr.splitlines(keepends=True) if not line.startswith(LINE_MARK))


def done(answer: Answer | subprocess.CompletedProcess[str]) -> Answer:
    """Require the status 0; return status, stdout and stderr."""
    if not isinstance(answer, Answer):
        answer = Answer(answer.returncode, answer.stdout, answer.stderr)
    assert answer.status == 0, answer
    return answer


def refused(answer: Answer | subprocess.CompletedProcess[str], *message: str, status: int = 1) -> tuple[str, str]:
    """Require a status, an error with these texts, a hint and nothing else; return (error, hint)."""
    if not isinstance(answer, Answer):
        answer = Answer(answer.returncode, answer.stdout, answer.stderr)
    assert answer.status == status, answer
    assert answer.out == ""
    assert "partial-" not in answer.err
    error, hint = without_progress(answer.err).strip().split("\nhint: ")
    assert error.startswith("Error: "), answer.err
    assert hint
    for part in message:
        assert part in error, error
    return error, hint
