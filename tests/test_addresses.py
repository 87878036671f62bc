"""No command sends anything to an address that the user did not name (docs/pages/install.md).

Packages report their use over the network, some from the day of an upgrade on. Here each command runs with a library
before libc that writes down which names its processes look up, and to which addresses they connect.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gmmvit_cli.commands import SUMMARIES
from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.files.caches import cache_folder
from tests.conftest import GOLDEN
from tests.serving.commands import ready
from tests.serving.gateways import KEY

pytestmark = [pytest.mark.nightly, pytest.mark.integration]
HERE = {"localhost", "127.0.0.1", "::1", "::ffff:127.0.0.1", "0.0.0.0", "::", socket.gethostname()}  # noqa: S104
_VARIABLES = ("ORT_DISABLE_TELEMETRY", "HF_HUB_DISABLE_TELEMETRY", "RAY_USAGE_STATS_ENABLED")
_IMAGE = f"registry.example/gmmvit@sha256:{'a' * 64}"
COMMANDS = {
    "inspect": "inspect CHECKPOINT",
    "export": "export CHECKPOINT -o exported --dataset cifar10",
    "parity": "parity BUNDLE --data images --runner onnxruntime,openvino",
    "convert": "convert BUNDLE --precision fp16",
    "bench": "bench BUNDLE --synthetic --runner onnxruntime --batch 1 --samples 64 --rounds 6 --no-roofline",
    "optimize": "optimize BUNDLE --data images",
    "repository": "repository BUNDLE -o models",
    "gateway": "gateway BUNDLE -o haproxy --keys keys.txt",
    "manifests": f"manifests BUNDLE -o manifests --image {_IMAGE} --model-uri pvc://claim",
    "pack": "pack BUNDLE -o packed",
    "classify": "classify images --bundle BUNDLE",
    "doctor": "doctor BUNDLE",
}
NOT_RUN = {
    "serve": "has a test of its own",
    "build": "asks only TensorRT, which few machines have",
    "train": "asks only PyTorch",
    "tune": "starts the servers of serve, and sends them the load of bench",
    "rollout": "starts the servers of serve",
    "demo": "runs the other commands",
}


@pytest.fixture(scope="module")
def folder(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a bundle, images and keys, and the library ``addresses.so``."""
    made = tmp_path_factory.mktemp("addresses")
    source = Path(__file__).with_name("addresses.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", made / "addresses.so", source, "-ldl"], check=True)
    shutil.copytree(bundle.path, made / "bundle")
    (made / "images").mkdir()
    for number in range(16):
        pixels = np.random.default_rng(number).integers(0, 256, (32, 32, 3), np.uint8)
        Image.fromarray(pixels).save(made / "images" / f"{number}.png")
    (made / "keys.txt").write_text(f"tester {KEY}\n")
    return made


@pytest.fixture
def watched(folder: Path, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment for a process whose addresses are written to the file of ``ADDRESSES``."""
    kept = {name: value for name, value in os.environ.items() if name not in _VARIABLES}
    own = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(cache_folder().parent), "ADDRESSES": str(tmp_path / "asked")}
    yield {**kept, **own, "LD_PRELOAD": str(folder / "addresses.so")}
    assert not [path for path in tmp_path.rglob("*") if "deviceid" in path.name]  # of ONNX Runtime's reports


def asked(environment: dict[str, str]) -> set[str]:
    log = Path(environment["ADDRESSES"])
    return set(log.read_text().splitlines()) if log.exists() else set()


def test_every_command_is_run_or_named() -> None:
    assert {*COMMANDS} | {*NOT_RUN} == {*SUMMARIES}


def test_the_library_sees_names_and_addresses(watched: dict[str, str]) -> None:
    code = (
        "import socket, urllib.request\n"
        "try: urllib.request.urlopen('http://name.invalid')\n"
        "except OSError: pass\n"
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(('192.0.2.1', 9))\n"
    )
    direct = {name: value for name, value in watched.items() if not name.lower().endswith("_proxy")}
    subprocess.run([sys.executable, "-c", code], env=direct, timeout=60, check=False)
    assert asked(watched) == {"name.invalid", "192.0.2.1"}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_asks_nobody_else(name: str, folder: Path, watched: dict[str, str]) -> None:
    words = COMMANDS[name].replace("BUNDLE", "bundle").replace("CHECKPOINT", str(GOLDEN / "vit_gmm.pth")).split()
    command = [sys.executable, "-m", "gmmvit_cli.main", *words]
    done = subprocess.run(command, cwd=folder, env=watched, capture_output=True, text=True, timeout=280, check=False)
    assert "Error:" not in done.stderr, done.stderr  # a verdict, such as that of bench on a busy machine, may be bad
    assert asked(watched) <= HERE


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_a_server_and_its_client_ask_nobody_else(runtime: str, folder: Path, watched: dict[str, str]) -> None:
    ports = [part for name in ("http", "grpc", "metrics", "classify") for part in (f"--{name}-port", "0")]
    command = [sys.executable, "-m", "gmmvit_cli.main", "serve", "bundle", "--runner", runtime, "--json", *ports]
    server = subprocess.Popen(
        command, cwd=folder, env=watched, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        url = ready(server)["grpc"]
        client = [sys.executable, "-m", "gmmvit_cli.main", "classify", "images", "--url", url]
        subprocess.run(client, cwd=folder, env=watched, capture_output=True, timeout=120, check=True)
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)
    assert asked(watched) <= HERE
