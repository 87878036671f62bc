"""Describe a checkpoint as plain JSON values."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from gmmvit_deploy.checkpoints.audit import audit_dead_masks
from gmmvit_deploy.checkpoints.loading import LoadedCheckpoint
from gmmvit_deploy.models.families.counting import multiply_accumulates
from gmmvit_deploy.models.specs import spec_to_json


def describe_checkpoint(loaded: LoadedCheckpoint) -> dict[str, Any]:
    """Return what the file, its model and its spec are, the unused keys, and the audit findings.

    ``macs``: multiply-accumulates per image.
    """
    spec, findings = loaded.spec, (*loaded.findings, *audit_dead_masks(loaded.model))
    return {
        "checkpoint": {"path": str(loaded.file.path), "sha256": loaded.file.sha256, "wrapping": loaded.file.wrapping},
        "taken_from": loaded.taken_from,
        "model": spec.title,
        "family": spec.family,
        "mask": spec.mask.kind,
        "mask_description": str(spec.mask),
        "trainable_parameters": loaded.trainable_parameters,
        "macs": multiply_accumulates(spec),
        "spec": spec_to_json(spec),
        "unused_keys": loaded.unused,
        "audit": [asdict(finding) for finding in findings],
    }
