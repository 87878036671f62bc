"""A successful command writes nothing but progress to stderr. tests/demo/test_demo.py checks this for `gmmvit demo`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.golden_files import GOLDEN

PROGRESS = "· "


def errors_of(*arguments: str | Path, timeout_s: float = 240) -> list[str]:
    """Run a command in a new interpreter, and return the lines of stderr that are not progress."""
    command = [sys.executable, "-m", "gmmvit_cli.main", *map(str, arguments)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert answer.returncode == 0, answer.stderr
    return [line for line in answer.stderr.splitlines() if not line.startswith(PROGRESS)]


@pytest.mark.process
@pytest.mark.export
def test_export_and_parity(tmp_path: Path) -> None:
    assert errors_of("export", GOLDEN / "vit_gmm.pth", "-o", tmp_path / "bundle", "--input", "tensor") == []
    assert errors_of("parity", tmp_path / "bundle", "--runner", "onnxruntime") == []
