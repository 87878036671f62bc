"""Every script in benchmarks/ runs with ``--check``, in seconds, and writes no result; fastest_gpu.py needs a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.documented import ROOT

RESULTS = ROOT / "benchmarks" / "results"
GPU_SCRIPTS = ("fastest_gpu", "masked_attention_gpu")
SCRIPTS = [path for path in sorted((ROOT / "benchmarks").glob("*.py")) if path.stem not in ("__init__", "tables")]
MORE_OPTIONS = {"before_after": ("--before", str(ROOT)), "masked_attention_gpu": ("--device", "cpu")}
"""Script → what it needs besides ``--check``."""


def times_of_results() -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in RESULTS.rglob("*")}


def check(script: Path, *options: str) -> None:
    before = times_of_results()
    command = [sys.executable, str(script), "--check", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert times_of_results() == before


@pytest.mark.process
@pytest.mark.rest
@pytest.mark.parametrize("script", [path for path in SCRIPTS if path.stem != "fastest_gpu"], ids=lambda path: path.stem)
def test_a_script_runs(script: Path) -> None:
    check(script, *MORE_OPTIONS.get(script.stem, ()))


@pytest.mark.gpu
@pytest.mark.process
@pytest.mark.rest
def test_the_scripts_of_gpus_run() -> None:
    for name in GPU_SCRIPTS:
        check(ROOT / "benchmarks" / f"{name}.py")
