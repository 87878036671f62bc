"""Every script below benchmarks/ runs with ``--check``, in seconds, and writes no result."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.documented import ROOT

RESULTS = ROOT / "benchmarks" / "results"
GPU = ("fastest_gpu", "masked_attention_gpu")
SCRIPTS = [path for path in sorted((ROOT / "benchmarks").glob("*.py")) if path.stem not in ("__init__", "tables")]
WITH = {"before_after": ("--before", str(ROOT)), "masked_attention_gpu": ("--device", "cpu")}
"""Script → what it needs besides ``--check``."""


def written() -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in RESULTS.rglob("*")}


def check(script: Path, *options: str) -> None:
    before = written()
    command = [sys.executable, str(script), "--check", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert written() == before


@pytest.mark.process
@pytest.mark.rest
@pytest.mark.parametrize("script", [path for path in SCRIPTS if path.stem != "fastest_gpu"], ids=lambda path: path.stem)
def test_a_script_runs(script: Path) -> None:
    check(script, *WITH.get(script.stem, ()))


@pytest.mark.gpu
@pytest.mark.process
def test_the_scripts_of_gpus_run() -> None:
    for name in GPU:
        check(ROOT / "benchmarks" / f"{name}.py")
