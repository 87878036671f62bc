"""Checkpoint file → the trained model, with every key of the file accounted for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from gmmvit_deploy.checkpoints import released_vit
from gmmvit_deploy.checkpoints.audit import Finding, audit_model, audit_tensors
from gmmvit_deploy.checkpoints.hints import LoadHints
from gmmvit_deploy.checkpoints.reading import TensorFile, read_tensors
from gmmvit_deploy.errors import CheckpointError
from gmmvit_deploy.models.vit import ViT
from gmmvit_deploy.specs import ModelSpec, spec_from_json

__all__ = ["LoadedCheckpoint", "load_checkpoint", "released_state_dict"]

_MOST_LISTED = 12
_OTHER_FAMILIES = {
    "relative_position_bias_table": "a Swin",
    "patch_transformer.": "a CaiT",
    "downsample.net.": "a PiT",
    "tokens_to_token.": "a T2T-ViT",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCheckpoint:
    """A trained model in evaluation mode, float32, on the CPU, and what is known of it.

    unused: key of the file → why the network never reads it.
    """

    file: TensorFile
    spec: ModelSpec
    model: ViT
    unused: dict[str, str]
    findings: tuple[Finding, ...]

    @property
    def trainable_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())


def load_checkpoint(path: Path, hints: LoadHints | None = None) -> LoadedCheckpoint:
    """Read, infer, build, fill and audit.

    Errors: CheckpointError on a file that cannot be read safely, is of an unknown architecture,
    misses keys, holds keys nobody knows, tensors of another shape or type, or NaN and infinities.
    """
    file = read_tensors(path)
    hints = _with_own_spec(file, hints or LoadHints())
    source = str(path)
    if not released_vit.is_vit(file.tensors):
        raise CheckpointError(f"{path}: {_unknown_architecture(file.tensors)}", hint="known: ViT (plain, GMM, ELM)")
    spec = released_vit.infer_spec(file.tensors, hints, source=source)
    names = released_vit.released_names(spec)
    unused = _account_for_keys(file, spec, names)
    findings = list(audit_tensors(file.tensors, used=set(names.values())))
    _refuse(source, findings)
    model = _built(spec, {ours: file.tensors[theirs] for ours, theirs in names.items()})
    findings += audit_model(model, spec, root_base=file.tensors.get("mask"))
    _refuse(source, findings)
    return LoadedCheckpoint(file=file, spec=spec, model=model, unused=unused, findings=tuple(findings))


def released_state_dict(model: ViT) -> dict[str, Tensor]:
    """The state dict that the released code would save for this model."""
    state = model.state_dict()
    names = released_vit.released_names(model.spec)
    released = {theirs: state[ours] for ours, theirs in names.items()}
    bases = [tensor for name, tensor in released.items() if name.endswith("fn.mask.mask") and tensor.ndim == 4]
    return {"mask": bases[0], **released} if bases else released


def _with_own_spec(file: TensorFile, hints: LoadHints) -> LoadHints:
    """Fill the hints from the spec that one of our own safetensors files carries."""
    data = file.spec_json()
    if data is None:
        return hints
    own = spec_from_json(data)
    return replace(
        hints,
        heads=own.heads if hints.heads is None and hints.preset is None else hints.heads,
        closed_form=own.mask.closed_form if hints.closed_form is None else hints.closed_form,
    )


def _unknown_architecture(tensors: Mapping[str, Tensor]) -> str:
    for part, family in _OTHER_FAMILIES.items():
        if any(part in name for name in tensors):
            return f"it looks like {family}, an architecture this version does not load"
    return f"unknown architecture; its first keys are {', '.join(list(tensors)[:4])}"


def _account_for_keys(file: TensorFile, spec: ModelSpec, names: Mapping[str, str]) -> dict[str, str]:
    """Every key used, known to be unused, or an error that lists it.  Returns the unused ones."""
    with torch.device("meta"):
        shapes = {names[ours]: tensor.shape for ours, tensor in ViT(spec).state_dict().items()}
    unused = {key: why for key, why in released_vit.known_unused(spec).items() if key in file.tensors}
    problems = [f"missing {key}" for key in shapes if key not in file.tensors]
    for key, tensor in file.tensors.items():
        if key in shapes and tensor.shape != shapes[key]:
            problems.append(f"{key} has shape {tuple(tensor.shape)}, wanted {tuple(shapes[key])}")
        elif key in shapes and tensor.dtype != torch.float32:
            problems.append(f"{key} is {tensor.dtype}, wanted torch.float32")
        elif key not in shapes and key not in unused:
            problems.append(f"unknown key {key} {tuple(tensor.shape)}")
    if problems:
        more = len(problems) - _MOST_LISTED
        listed = "\n  ".join(problems[:_MOST_LISTED] + ([f"and {more} more"] if more > 0 else []))
        raise CheckpointError(
            f"{file.path}: read as {spec.family} with {spec.mask} mask, {len(problems)} keys do not fit:\n  {listed}",
            hint="the file and the architecture must agree key by key; nothing is filled in or left out silently",
        )
    return unused


def _built(spec: ModelSpec, state: Mapping[str, Tensor]) -> ViT:
    model = ViT(spec)
    # Tied tensors share storage in the file; copies keep layers independent here.
    model.load_state_dict({name: tensor.detach().clone() for name, tensor in state.items()}, strict=True)
    return model.eval().requires_grad_(True)


def _refuse(source: str, findings: list[Finding]) -> None:
    errors = [f"{finding.where}: {finding.what}" for finding in findings if finding.severity == "error"]
    if errors:
        more = len(errors) - _MOST_LISTED
        listed = "\n  ".join(errors[:_MOST_LISTED] + ([f"and {more} more"] if more > 0 else []))
        raise CheckpointError(
            f"{source}: it would give meaningless answers:\n  {listed}",
            hint="the training diverged, or the file is damaged",
        )
