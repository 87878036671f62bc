"""What the program states about a file does not depend on the model of the processor.

`make test-rest` runs the numeric unit tests again with the settings of `OTHER_ARITHMETIC` in the Makefile, and
with AVX2. The tests here compare two processes of the same run, also on an emulated processor.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from gmmvit_deploy.inference.cores import cpu_features

pytestmark = [pytest.mark.integration, pytest.mark.nightly]

ROOT = Path(__file__).parents[1]
EMULATOR = "qemu-x86_64"
_STATED = re.search(r"^OTHER_ARITHMETIC := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]  # type: ignore[index]
OTHER_ARITHMETIC = dict(setting.split("=") for setting in _STATED.split())
DESCRIBE = """
import json, sys
import numpy as np
import torch
from gmmvit_deploy.checkpoints.loading import describe_checkpoint, load_checkpoint
from tests.golden_files import golden
described = {}
for case in map(golden, sys.argv[1:]):
    loaded = load_checkpoint(case.path, case.hints)
    with torch.inference_mode():
        logits = loaded.model(torch.from_numpy(case.inputs)).numpy()
    np.testing.assert_allclose(logits, case.logits, rtol=0, atol=case.atol, err_msg=case.name)
    described[case.name] = describe_checkpoint(loaded)
print(json.dumps(described))
"""


NETWORKS = ("vit_gmm", "swin_gmm", "rmt_tiny_like")


@cache
def described(*settings: tuple[str, str], networks: tuple[str, ...] = NETWORKS, emulator: tuple[str, ...] = ()) -> Any:
    """Compare golden logits in a process with these settings; return name → what ``gmmvit inspect --json`` states."""
    command = [*emulator, str(Path(sys.executable).resolve()), "-c", DESCRIBE, *networks]
    path = os.pathsep.join(filter(None, [str(ROOT), *sys.path]))
    environment = {**os.environ, "PYTHONPATH": path, **dict(settings)}
    limit_s = 1400 if emulator else 240
    answer = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit_s)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


def test_golden_logits_and_what_inspect_states() -> None:
    assert described(*OTHER_ARITHMETIC.items()) == described()


@pytest.mark.timeout(1500)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="emulates another x86-64 processor")
@pytest.mark.skipif("avx512f" not in cpu_features(), reason="this processor has no more than a Haswell")
@pytest.mark.skipif(shutil.which(EMULATOR) is None, reason=f"no {EMULATOR} here; Debian has it in qemu-user")
def test_golden_logits_on_an_emulated_haswell() -> None:
    """A processor with AVX2, and without AVX-512 and VNNI."""
    networks = ("vit_gmm", "swin_gmm")
    here = described(networks=networks)
    assert described(networks=networks, emulator=(EMULATOR, "-cpu", "Haswell")) == here
