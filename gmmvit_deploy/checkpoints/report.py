"""What there is to say about a checkpoint, as plain JSON values."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from gmmvit_deploy.checkpoints.hints import LoadHints
from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.specs import spec_to_json

__all__ = ["report_on"]


def report_on(path: Path, hints: LoadHints | None = None) -> dict[str, Any]:
    """Load a checkpoint and describe it.  Errors: as `load_checkpoint`."""
    loaded = load_checkpoint(path, hints)
    return {
        "checkpoint": {"path": str(path), "sha256": loaded.file.sha256, "wrapping": loaded.file.wrapping},
        "family": loaded.spec.family,
        "mask": loaded.spec.mask.kind,
        "mask_description": str(loaded.spec.mask),
        "trainable_parameters": loaded.trainable_parameters,
        "spec": spec_to_json(loaded.spec),
        "unused_keys": loaded.unused,
        "audit": [asdict(finding) for finding in loaded.findings],
    }
