"""Manifests for tests, and the file of a measurement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.kubernetes.options import ManifestOptions, model_uri
from gmmvit_deploy.kubernetes.write import WrittenManifests, manifests_from_bundle

__all__ = ["DIGEST", "IMAGE", "OCI", "objects_in", "tuning_file", "write"]

DIGEST = "sha256:" + "ab" * 32
IMAGE = f"registry.example/gmmvit@{DIGEST}"
OCI = f"oci://registry.example/model@{DIGEST}"


def tuning_file(
    bundle: Bundle, file: Path, *, instances: int = 2, threads: int = 3, cores: int = 8, sha256: str = ""
) -> Path:
    """Write the fields of a file of ``gmmvit tune`` that manifests read; `test_tune.py` holds them to the writer."""
    best = {"backend": "python", "runtime": "onnxruntime", "precision": "fp32", "cpu_kernels": {"used": False}}
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
    chosen = ManifestOptions(style=style, image=IMAGE, model=model_uri(model), fetch_image=IMAGE, **options)
    return manifests_from_bundle(bundle.path, out, chosen, tuned=tuned or None)


def objects_in(folder: Path) -> list[dict[str, Any]]:
    """Return the objects of a folder of a kustomization."""
    listed = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    return [yaml.safe_load((folder / name).read_text()) for name in listed]
