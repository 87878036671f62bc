"""What the program states about a file does not depend on the model of the processor.

`make test` runs its fast numeric tests again with the settings of `OTHER_ARITHMETIC`, and `make test-rest` with each
alone. The tests here compare two processes of the same run, and run golden logits on an emulated processor.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
EMULATOR = "qemu-x86_64"
OTHER_ARITHMETIC = {
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "MKL_CBWR": "COMPATIBLE",
    "OMP_NUM_THREADS": "2",
}
DESCRIBE = """
import json
import numpy as np
import torch
from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.checkpoints.report import describe_checkpoint
from tests.golden_files import MANIFEST, golden
described = {}
networks = {(entry["family"], entry["mask"]): name for name, entry in MANIFEST.items()}
for case in map(golden, networks.values()):
    loaded = load_checkpoint(case.path, case.hints)
    with torch.inference_mode():
        logits = loaded.model(torch.from_numpy(case.inputs)).numpy()
    np.testing.assert_allclose(logits, case.logits, rtol=0, atol=case.atol, err_msg=case.name)
    described[case.name] = describe_checkpoint(loaded)
print(json.dumps(described))
"""


@cache
def described(*settings: tuple[str, str]) -> dict[str, Any]:
    """Compare golden logits in a process with these settings; return name → what ``gmmvit inspect --json`` states."""
    command = [sys.executable, "-c", DESCRIBE]
    environment = {**os.environ, **dict(settings)}
    answer = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert answer.returncode == 0, answer.stderr
    return dict(json.loads(answer.stdout))


@pytest.mark.process
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(OTHER_ARITHMETIC, id="all"),
        *(pytest.param({name: value}, id=name, marks=pytest.mark.rest) for name, value in OTHER_ARITHMETIC.items()),
        pytest.param({"ATEN_CPU_CAPABILITY": "avx2"}, id="avx2", marks=pytest.mark.rest),
    ],
)
def test_golden_logits_and_what_inspect_states(settings: dict[str, str]) -> None:
    assert described(*settings.items()) == described()


@pytest.mark.process
@pytest.mark.rest
@pytest.mark.timeout(1500)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="emulates another x86-64 processor")
@pytest.mark.skipif(shutil.which(EMULATOR) is None, reason=f"no {EMULATOR} here; Debian has it in qemu-user")
def test_golden_logits_on_an_emulated_haswell() -> None:
    """A processor with AVX2, and without AVX-512 and VNNI."""
    tests = ["tests/scores/test_masks.py", "tests/checkpoints/test_audit.py", "tests/families/test_contract.py"]
    networks = "vit_gmm or swin_gmm or cait_gmm or pit_gmm or t2t_gmm"
    chosen = f"test_masks or test_audit or (test_golden_logits and ({networks}))"
    python = (EMULATOR, "-cpu", "Haswell", Path(sys.executable).resolve())
    path = os.pathsep.join(filter(None, [str(ROOT), *sys.path]))
    no_limit = ("-o", "timeout=0", "-o", "faulthandler_timeout=0")
    options = ("-m", "pytest", "-q", "-p", "no:xdist", *no_limit, "-m", "not export")
    answer = subprocess.run(
        [*python, *options, *tests, "-k", chosen],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=1400,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stdout[-3000:] + answer.stderr[-2000:]
    assert " passed" in answer.stdout
