"""The objects of KServe go through the models of the package kserve: nothing is lost, nothing is unknown.

`tests/serving/test_kserve.py` states how to make the environment with this package.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from gmmvit_deploy.bundle.artifacts import Bundle
from tests.kubernetes.made import OCI, write

PYTHON = os.environ.get("GMMVIT_KSERVE_PYTHON")
FILES = ("servingruntime.yaml", "inferenceservice.yaml")


@pytest.mark.integration
@pytest.mark.skipif(PYTHON is None, reason="GMMVIT_KSERVE_PYTHON names no Python with the package kserve")
@pytest.mark.parametrize("model", [OCI, "pvc://models/vit", "s3://bucket/vit"])
def test_nothing_is_lost_or_unknown(bundle: Bundle, tmp_path: Path, model: str) -> None:
    written = write(bundle, tmp_path / "out", style="kserve", model=model)
    script = Path(__file__).with_name("kserve_models.py")
    command = [str(PYTHON), script, *(written.apply / name for name in FILES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    ours = [yaml.safe_load((written.apply / name).read_text()) for name in FILES]
    runtime, service = json.loads(done.stdout.splitlines()[-1])
    assert service["spec"]["predictor"]["model"].pop("name") == ""  # the model itself adds its default
    assert [runtime, service] == ours
