"""Dockerfiles: hadolint has no complaint, and exactly the listed packages serve a packed repository.

No image is built here, because that needs a registry. The environment of the slim image is made from links to the files
of the listed packages: any other package, such as torch, cannot be imported there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import urllib.request
from importlib.metadata import distribution
from pathlib import Path

import pytest

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.kubernetes._dockerfiles import docker_files, image_packages
from gmmvit_deploy.serving.repository import Repository
from gmmvit_deploy.serving.server_wheel import PACKAGE
from tests.haproxy import needs_haproxy
from tests.kubernetes.made import COMPILERS, hadolint, linked_environment
from tests.serving.commands import Serve

pytestmark = pytest.mark.integration
ABSENT = ("torch", "onnx", "onnxruntime", "onnxscript", "openvino_telemetry", "safetensors", "yaml", "timm")
KEY = "key-of-the-slim-image-0123456789"
MAX_MIB = 357
"""Of the packages beside the server's wheel, which has 143 MiB: 0.5 GB, as the page says."""


@pytest.mark.parametrize(
    ("kind", "engine"), [("cpu", False), ("nvidia", False), ("nvidia", True)], ids=["cpu", "nvidia", "engine"]
)
def test_hadolint_has_no_complaint(tmp_path: Path, kind: str, engine: bool) -> None:
    file = tmp_path / "Dockerfile"
    file.write_text(
        docker_files([] if engine else ["openvino"], engine=engine, cpu=not engine)[f"docker/{kind}/Dockerfile"]
    )
    assert hadolint(file) == ""


def test_the_slim_image_is_small() -> None:
    packages = image_packages(["openvino"])
    files = [file for name in packages.keys() - {PACKAGE} for file in distribution(name).files or ()]
    assert sum(file.size or 0 for file in files) / 2**20 < MAX_MIB
    assert not packages.keys() & {*ABSENT, "nvidia-cublas"}
    assert "onnxruntime" in image_packages(["onnxruntime"])


def path_of_the_image(python: Path, programs: Path) -> str:
    """Return a PATH with the environment, haproxy, and the shell of the base by which Triton starts its workers."""
    programs.mkdir()
    for name in ("bash", "haproxy"):
        (programs / name).symlink_to(str(shutil.which(name)))
    return f"{python}:{programs}"


def mapped_below(pid: int) -> str:
    """Return the files that a process and all that it started have mapped."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return Path(f"/proc/{pid}/maps").read_text() + "".join(mapped_below(int(child)) for child in children)


@needs_haproxy
@pytest.mark.nightly
def test_exactly_the_listed_packages_serve(repository: Repository, bundle: Bundle, tmp_path: Path) -> None:
    python = linked_environment(tmp_path / "venv", [*image_packages(["openvino"])])
    path = path_of_the_image(python.parent, tmp_path / "programs")
    assert not [name for name in COMPILERS if shutil.which(name, path=path)]
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CXX")}
    environment = {**clean, "PATH": path, "HOME": str(tmp_path)}  # HOME: no library of an earlier compilation
    assert repository.runner == "openvino+kernels"
    script = "import importlib.util as u, sys; print([name for name in sys.argv[1:] if u.find_spec(name)])"
    absent = subprocess.run(
        [python, "-c", script, *ABSENT], capture_output=True, text=True, check=True, env=environment, cwd=tmp_path
    )
    assert absent.stdout.strip() == "[]"
    models = tmp_path / "models"
    shutil.copytree(repository.path, models)
    (tmp_path / "keys.txt").write_text(f"test {KEY}\n")
    gateway = ("--gateway", "--keys", "keys.txt")
    with Serve(models, *gateway, before=(str(python),), env=environment, cwd=tmp_path) as running:
        url = running.ready()["http"]
        image = bundle.golden_set().images[0]
        request = urllib.request.Request(  # noqa: S310 - the address that the server printed
            f"{url}/classify", data=bytes(image), headers={"Authorization": f"Bearer {KEY}"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
            assert answer.headers["x-gmmvit-bundle"] == bundle.sha256
            assert json.loads(answer.read())["bundle"] == bundle.sha256
        assert "openvino_kernels.so" in mapped_below(running.process.pid)
        running.process.terminate()
        status, errors = running.end(timeout_s=60)
    assert status == 0, errors
