"""Run another project's tool, or a command of ours, and keep the reason of a failure."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Any

from benchmarks.shared.places import ROOT


def why_failed(command: Sequence[Any]) -> str:
    """Run a command in the repository, and return the last line that names its error; "" if the command succeeds."""
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, check=False)
    if not done.returncode:
        return ""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or [f"exit status {done.returncode}"])[-1].strip()
