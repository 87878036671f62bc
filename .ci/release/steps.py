"""How a step fails, and how it runs a program."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["ReleaseError", "clean_environment", "git", "run"]

_LINES = 30  # of a failed program's output


class ReleaseError(Exception):
    """A step failed.  hint: what to do, or the output of the program that failed."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


def clean_environment() -> dict[str, str]:
    """Return the environment variables without those that lead Python or gmmvit to other code or settings."""
    foreign = ("PYTHON", "VIRTUAL_ENV", "GMMVIT_")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)}


def run(
    command: Sequence[str], step: str, *, cwd: Path | None = None, environment: Mapping[str, str] | None = None
) -> str:
    """Run a program and return its stdout.

    step: what the program does, for the message.  environment: `clean_environment` by default.
    Errors: ReleaseError with the end of the program's output.
    """
    variables = clean_environment() if environment is None else dict(environment)
    answer = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=variables)
    if answer.returncode:
        output = (answer.stdout + answer.stderr).strip().splitlines()[-_LINES:]
        raise ReleaseError(f"{step}: {command[0]} ended with status {answer.returncode}", hint="\n".join(output))
    return answer.stdout


def git(root: Path, *arguments: str) -> str:
    """Return what git prints.  Errors: ReleaseError."""
    try:
        return run(["git", "-C", str(root), *arguments], f"git {arguments[0]}", environment=os.environ)
    except FileNotFoundError as exc:
        raise ReleaseError(f"git {arguments[0]}: there is no git on PATH", hint="install git") from exc
