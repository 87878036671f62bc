"""Manifests for tests, the file of a measurement, and checks of what is written."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

import gmmvit_cli
import gmmvit_deploy
from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.kubernetes.options import ManifestOptions, location
from gmmvit_deploy.kubernetes.write import WrittenManifests, manifests_from_bundle
from gmmvit_deploy.serving.server_wheel import PACKAGE, wheel_folder

DIGEST = "sha256:" + "ab" * 32
IMAGE = f"registry.example/gmmvit@{DIGEST}"
OCI = f"oci://registry.example/model@{DIGEST}"
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "zig", "ld", "as")
KUBERNETES = ("1.33", "1.35")
"""The releases of Kubernetes whose schemas the objects are held to."""
OPERATORS = ("serving.kserve.io/", "monitoring.coreos.com/")
"""Groups of objects that are not those of Kubernetes itself."""


def tuning_file(
    bundle: Bundle, file: Path, *, instances: int = 2, threads: int = 3, cores: int = 8, sha256: str = ""
) -> Path:
    """Write the fields of a file of ``gmmvit tune`` that manifests read; `test_tune.py` holds them to the writer."""
    best = {"backend": "python", "runner": "onnxruntime"}
    data = {
        "best": {**best, "instances": instances, "threads": threads, "max_queue_delay_us": 500},
        "rate": 400.0,
        "bound_ms": 50.0,
        "peak_bytes": 500 * 2**20,
        "machine": {"cores_allowed": cores},
        "bundle": {"sha256": sha256 or bundle.sha256},
    }
    file.write_text(json.dumps(data))
    return file


def write(
    bundle: Bundle, out: Path, *, style: Any = "deployment", model: str = OCI, tuned: Path | bool = True, **options: Any
) -> WrittenManifests:
    """Write manifests.  tuned: a file, or True for a measurement of this bundle, or False for no measurement."""
    if tuned is True:
        tuned = tuning_file(bundle, out.parent / "tuned.json")
    options = {"image": IMAGE, "fetch_image": IMAGE, **options}
    chosen = ManifestOptions(style=style, model=location(model, "--model-uri", oci=True), **options)
    return manifests_from_bundle(bundle.path, out, chosen, tuned=tuned or None)


def objects_in(folder: Path) -> list[dict[str, Any]]:
    """Return the objects of a folder of a kustomization."""
    listed = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    return [yaml.safe_load((folder / name).read_text()) for name in listed]


def object_in(written: WrittenManifests, kind: str) -> dict[str, Any]:
    return next(item for item in objects_in(written.apply) if item["kind"] == kind)


def validate(folder: Path) -> None:
    """Hold the objects of Kubernetes itself to its schemas, without unknown fields."""
    for item in objects_in(folder):
        if not item["apiVersion"].startswith(OPERATORS):
            for release in KUBERNETES:
                kubernetes_validate.validate(item, release, strict=True)


def hadolint(file: Path) -> str:
    """Return the complaints about a Dockerfile."""
    program = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([program, "--no-color", file], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def linked_environment(folder: Path, names: list[str]) -> Path:
    """Make an environment of links to the files of these distributions and of this package.  Returns its Python.

    Any other package, such as torch, cannot be imported there.
    """
    venv.create(folder, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    if PACKAGE in names:  # pip would install it in the image; here it may lie in the cache
        for name in ("pytriton", "nvidia_pytriton.libs"):
            (site / name).symlink_to(wheel_folder() / name)
    for name in names:
        if name == PACKAGE:
            continue
        package = distribution(name)
        for file in package.files or ():
            top = file.parts[0]
            source = Path(str(package.locate_file(top)))
            if top not in ("..", "__pycache__") and not (site / top).exists() and source.exists():
                (site / top).symlink_to(source)
    own = Path(str(distribution("gmmvit-deploy").locate_file("")))
    for info in own.glob("gmmvit_deploy-*.dist-info"):  # its version is part of the plan of bulk work
        (site / info.name).symlink_to(info)
    for module in (gmmvit_deploy, gmmvit_cli):
        source = Path(str(module.__file__)).parent
        (site / source.name).symlink_to(source)
    return folder / "bin" / "python3"
