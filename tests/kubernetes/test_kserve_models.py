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
from tests.kubernetes.made import OCI, object_in, validate, write

PYTHON = os.environ.get("GMMVIT_KSERVE_PYTHON")
needs_kserve = pytest.mark.skipif(PYTHON is None, reason="GMMVIT_KSERVE_PYTHON names no Python with the package kserve")
FILES = ("servingruntime.yaml", "inferenceservice.yaml")
pytestmark = pytest.mark.process


def through_models(folder: Path) -> subprocess.CompletedProcess[str]:
    script = Path(__file__).with_name("kserve_models.py")
    command = [str(PYTHON), str(script), *(str(folder / name) for name in FILES)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@needs_kserve
@pytest.mark.parametrize("model", [OCI, "pvc://models/vit", "s3://bucket/vit"])
def test_nothing_is_lost_or_unknown(bundle: Bundle, tmp_path: Path, model: str) -> None:
    written = write(bundle, tmp_path / "out", style="kserve", model=model)
    done = through_models(written.apply)
    assert done.returncode == 0, done.stderr
    ours = [yaml.safe_load((written.apply / name).read_text()) for name in FILES]
    runtime, service = json.loads(done.stdout.splitlines()[-1])
    assert service["spec"]["predictor"]["model"].pop("name") == ""  # the model itself adds its default
    assert [runtime, service] == ours


@needs_kserve
@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        (
            "inferenceservice.yaml",
            "terminationGracePeriodSeconds",
            "terminationGraceSeconds",
            "terminationGraceSeconds",
        ),
        ("inferenceservice.yaml", "minReplicas: 2", "minReplicas: two", "expected int, got 'two'"),
        ("servingruntime.yaml", "supportedModelFormats", "supportedFormats", "supportedFormats"),
    ],
)
def test_a_planted_mistake_is_refused(
    bundle: Bundle, tmp_path: Path, file: str, old: str, new: str, message: str
) -> None:
    written = write(bundle, tmp_path / "out", style="kserve")
    text = (written.apply / file).read_text()
    assert old in text
    (written.apply / file).write_text(text.replace(old, new))
    done = through_models(written.apply)
    assert done.returncode != 0
    assert message in done.stderr


def test_the_other_objects_fit_the_pods_of_kserve(bundle: Bundle, tmp_path: Path) -> None:
    written = write(bundle, tmp_path / "out", style="kserve", clients="istio-system")
    validate(written.apply)
    assert object_in(written, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == {
        "serving.kserve.io/inferenceservice": "gmmvit"
    }
