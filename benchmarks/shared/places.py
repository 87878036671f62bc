"""The paths of scripts and results, and commands that run in the repository."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gmmvit_deploy.models import families
from gmmvit_deploy.models.families import PRESETS

BENCHMARKS = Path(__file__).parents[1]
ROOT = BENCHMARKS.parent
RESULTS = BENCHMARKS / "results"

FAMILIES = tuple(family.name for family in families.FAMILIES if family.name in PRESETS and "gmm" in family.mask_kinds)
"""The names of the paper's families, in the paper's order.  Each has GMM masks and a preset with the family's name."""


def result_of(script: str, *, suffix: str = ".json") -> Path:
    """Return the result file of a script.  The suffix "" makes it a folder with a result for each family."""
    return RESULTS / f"{Path(script).stem}{suffix}"


def why_failed(command: Sequence[Any]) -> str:
    """Run a command in the repository, and return the last line that names its error; "" if the command succeeds."""
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, check=False)
    if not done.returncode:
        return ""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or [f"exit status {done.returncode}"])[-1].strip()
