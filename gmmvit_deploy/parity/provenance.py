"""What exactly a report speaks of: hashes of the bundle, and of the graph, plan or server that ran."""

from __future__ import annotations

from typing import Any

from gmmvit_deploy.artifacts import Bundle
from gmmvit_deploy.engines.runner import EngineRunner
from gmmvit_deploy.runtime.eager import EagerRunner
from gmmvit_deploy.runtime.openvino import OpenVinoRunner
from gmmvit_deploy.runtime.runner import Runner
from gmmvit_deploy.runtime.triton import TritonRunner
from gmmvit_deploy.variants import open_variant

__all__ = ["described_bundle", "provenance"]


def provenance(bundle: Bundle, runner: Runner) -> dict[str, str]:
    """Name → value: what ran, by hash, and the settings that it ran with."""
    return {**_program(bundle, runner), **runner.settings}


def _program(bundle: Bundle, runner: Runner) -> dict[str, str]:
    if isinstance(runner, TritonRunner):
        connection = runner.connection
        return {"server": f"Triton {connection.version()} at {connection.url}", "model": runner.network}
    if isinstance(runner, EngineRunner):
        return {f"{name} SHA-256": value for name, value in runner.card.sha256.items()}
    if isinstance(runner, EagerRunner):
        return {"weights SHA-256": bundle.manifest.files[bundle.weights_path.name]}
    if isinstance(runner, OpenVinoRunner):
        kernels = ", ".join(f"{count} {kernel}" for kernel, count in runner.program.kernels.items())
        return {
            "graph": runner.variant.path.name,
            "graph SHA-256": runner.variant.sha256,
            "OpenVINO": runner.version,
            "kernels": kernels,
        }
    variant = open_variant(bundle, runner.precision)
    return {"graph": variant.path.name, "graph SHA-256": variant.sha256}


def described_bundle(bundle: Bundle) -> dict[str, Any]:
    """Hashes, and what the model is."""
    manifest = bundle.manifest
    return {
        "path": str(bundle.path),
        "sha256": bundle.sha256,
        "onnx_sha256": manifest.files[bundle.onnx_path.name],
        "checkpoint": dict(manifest.checkpoint),
        "model": f"{manifest.spec.family}, {manifest.spec.mask}",
        "input": manifest.input_kind,
        "exported_with": dict(manifest.versions),
    }
