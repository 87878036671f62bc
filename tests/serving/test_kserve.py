"""The clients of the package kserve infer through the gateway of ``gmmvit serve``, unchanged, with a key.

kserve needs other versions of numpy and protobuf than this package, so it lives in an environment of its own:

    python -m venv kserve && kserve/bin/pip install kserve==0.21.0
    GMMVIT_KSERVE_PYTHON=kserve/bin/python pytest tests/serving/test_kserve.py
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.serving.gateway.gateway import Gateway
from gmmvit_deploy.serving.gateway.options import GatewaySettings
from tests.certificates import self_signed
from tests.conftest import FREE_PORTS
from tests.haproxy import needs_haproxy
from tests.serving.gateways import KEY, key_file
from tests.serving.shared import Running

PYTHON = os.environ.get("GMMVIT_KSERVE_PYTHON")
pytestmark = [
    pytest.mark.nightly,
    needs_haproxy,
    pytest.mark.integration,
    pytest.mark.skipif(PYTHON is None, reason="GMMVIT_KSERVE_PYTHON names no Python with the package kserve"),
]


def test_binary_tensors_over_http_and_grpc(server: Running, bundle: Bundle, tmp_path: Path) -> None:
    pixels, logits = bundle.golden()
    np.save(tmp_path / "pixels.npy", pixels)
    (tmp_path / "key.txt").write_text(f"{KEY}\n")
    trusted = self_signed(tmp_path)
    settings = GatewaySettings(
        keys=key_file(tmp_path), tls_cert=trusted.both, access_log=tmp_path / "access.log", max_body_bytes=100_000
    )
    gateway = Gateway(settings, **FREE_PORTS)
    try:
        gateway.start(server)
        done = subprocess.run(
            [
                str(PYTHON),
                Path(__file__).with_name("kserve_client.py"),
                gateway.http_url,
                gateway.grpc_url.removeprefix("grpcs://"),
                tmp_path / "key.txt",
                trusted.certificate,
                tmp_path / "pixels.npy",
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    finally:
        gateway.stop()
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.splitlines()[-1])
    assert answers.keys() == {"http", "grpc"}
    for answer in answers.values():
        np.testing.assert_allclose(np.reshape(answer, logits.shape), logits, rtol=0, atol=1e-5)
    lines = [json.loads(line) for line in (tmp_path / "access.log").read_text().splitlines()]
    assert {(line["protocol"], line["client"]) for line in lines} == {("http", "tester"), ("grpc", "tester")}
