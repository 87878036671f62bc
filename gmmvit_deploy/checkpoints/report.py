"""Describe a checkpoint or a spec as plain JSON values."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from gmmvit_deploy.checkpoints.audit import audit_dead_masks
from gmmvit_deploy.checkpoints.loading import LoadedCheckpoint
from gmmvit_deploy.models.families import model_from_spec
from gmmvit_deploy.models.families.counting import multiply_accumulates, trainable_parameters
from gmmvit_deploy.models.layers.shapes_only import shapes_only
from gmmvit_deploy.models.specs import ModelSpec, spec_to_json


def describe_checkpoint(loaded: LoadedCheckpoint) -> dict[str, Any]:
    """Return a description of the file, of the spec (`describe_spec`), of the unused keys and of the audit findings."""
    findings = (*loaded.findings, *audit_dead_masks(loaded.model))
    return {
        "checkpoint": {"path": str(loaded.file.path), "sha256": loaded.file.sha256, "wrapping": loaded.file.wrapping},
        "taken_from": loaded.taken_from,
        **describe_spec(loaded.spec),
        "unused_keys": loaded.unused,
        "audit": [asdict(finding) for finding in findings],
    }


def describe_spec(spec: ModelSpec) -> dict[str, Any]:
    """Return title, family, mask, number of trainable parameters, multiply-accumulates (MACs) per image, and spec."""
    with shapes_only():
        parameters = trainable_parameters(model_from_spec(spec))
    return {
        "model": spec.title,
        "family": spec.family,
        "mask": spec.mask.kind,
        "mask_description": str(spec.mask),
        "trainable_parameters": parameters,
        "macs": multiply_accumulates(spec),
        "spec": spec_to_json(spec),
    }
