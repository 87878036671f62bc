"""Describe a bundle for reports, and convert values to JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gmmvit_deploy.bundle.artifacts import Bundle


def described_bundle(bundle: Bundle) -> dict[str, Any]:
    """Return the path, hashes, checkpoint, model, input kind and export versions of a bundle."""
    manifest = bundle.manifest
    resizing = f", {manifest.spec.resizing}" if manifest.spec.resizing else ""
    return {
        "path": str(bundle.path),
        "sha256": bundle.sha256,
        "onnx_sha256": manifest.files[bundle.onnx_path.name],
        "checkpoint": dict(manifest.checkpoint),
        "model": f"{manifest.spec.title}{resizing}",
        "input": manifest.input_kind,
        "exported_with": dict(manifest.versions),
    }


def plain(value: Any) -> Any:
    """Convert a value to plain JSON values.  NaN and infinite values become null."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
