"""Checkpoint file → the trained model, with every key of the file accounted for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from gmmvit_deploy.checkpoints.audit import Finding, audit_model, audit_tensors
from gmmvit_deploy.checkpoints.families import family_of, known_unused, released_names
from gmmvit_deploy.checkpoints.hints import LoadHints
from gmmvit_deploy.checkpoints.inference import Shapes
from gmmvit_deploy.checkpoints.reading import TensorFile, read_tensors
from gmmvit_deploy.errors import CheckpointError
from gmmvit_deploy.models.build import Model, model_from_spec
from gmmvit_deploy.models.counting import trainable_parameters
from gmmvit_deploy.specs import FAMILIES, ModelSpec, spec_from_json

__all__ = ["LoadedCheckpoint", "load_checkpoint", "released_state_dict"]

_MOST_LISTED = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCheckpoint:
    """A trained model in evaluation mode, float32, on the CPU, and what is known of it.

    unused: key of the file → why the network never reads it.
    """

    file: TensorFile
    spec: ModelSpec
    model: Model
    unused: dict[str, str]
    findings: tuple[Finding, ...]

    @property
    def trainable_parameters(self) -> int:
        return trainable_parameters(self.model)


def load_checkpoint(path: Path, hints: LoadHints | None = None) -> LoadedCheckpoint:
    """Read, infer, build, fill and audit.

    Errors: CheckpointError on a file that cannot be read safely, is of an unknown architecture,
    misses keys, holds keys nobody knows, tensors of another shape or type, or NaN and infinities.
    """
    file = read_tensors(path)
    hints = _with_own_spec(file, hints or LoadHints())
    source = str(path)
    family = family_of(file.tensors)
    if family is None:
        raise CheckpointError(
            f"{path}: unknown architecture; its first keys are {', '.join(list(file.tensors)[:4])}",
            hint=f"known are the released code's {', '.join(FAMILIES)}, plain and masked",
        )
    spec: ModelSpec = family.infer_spec(Shapes(file.tensors, source), hints)
    names = released_names(spec)
    unused = _account_for_keys(file, spec, names)
    findings = list(audit_tensors(file.tensors, used=set(names.values())))
    _refuse(source, findings)
    model = _built(spec, {ours: file.tensors[theirs] for ours, theirs in names.items()})
    findings += audit_model(model, unused={key: file.tensors[key] for key in unused})
    _refuse(source, findings)
    return LoadedCheckpoint(file=file, spec=spec, model=model, unused=unused, findings=tuple(findings))


def released_state_dict(model: Model) -> dict[str, Tensor]:
    """The state dict that the released code would save for this model, less the bases it stores unused."""
    state = model.state_dict()
    return {theirs: state[ours] for ours, theirs in released_names(model.spec).items()}


def _with_own_spec(file: TensorFile, hints: LoadHints) -> LoadHints:
    """Fill the hints from the spec that one of our own safetensors files carries."""
    data = file.spec_json()
    if data is None:
        return hints
    own = spec_from_json(data)
    return replace(
        hints,
        heads=_first(own.heads) if hints.heads is None and hints.preset is None else hints.heads,
        closed_form=own.mask.closed_form if hints.closed_form is None else hints.closed_form,
    )


def _first(heads: int | tuple[int, ...]) -> int:
    return heads if isinstance(heads, int) else heads[0]


def _account_for_keys(file: TensorFile, spec: ModelSpec, names: Mapping[str, str]) -> dict[str, str]:
    """Every key used, known to be unused, or an error that lists it.  Returns the unused ones."""
    with torch.device("meta"):
        wanted = {names[ours]: tensor for ours, tensor in model_from_spec(spec).state_dict().items()}
    unused = {key: why for key, why in known_unused(spec).items() if key in file.tensors}
    problems = [f"missing {key}" for key in wanted if key not in file.tensors]
    for key, tensor in file.tensors.items():
        if key in wanted and tensor.shape != wanted[key].shape:
            problems.append(f"{key} has shape {tuple(tensor.shape)}, wanted {tuple(wanted[key].shape)}")
        elif key in wanted and tensor.dtype != wanted[key].dtype:
            problems.append(f"{key} is {tensor.dtype}, wanted {wanted[key].dtype}")
        elif key not in wanted and key not in unused:
            problems.append(f"unknown key {key} {tuple(tensor.shape)}")
    if problems:
        raise CheckpointError(
            f"{file.path}: read as {spec.family} with {spec.mask} mask, {len(problems)} keys do not fit:"
            + _listed(problems),
            hint="the file and the architecture must agree key by key; nothing is filled in or left out silently",
        )
    return unused


def _built(spec: ModelSpec, state: Mapping[str, Tensor]) -> Model:
    model = model_from_spec(spec)
    # Tied tensors share storage in the file; copies keep layers independent here.
    model.load_state_dict({name: tensor.detach().clone() for name, tensor in state.items()}, strict=True)
    return model.eval().requires_grad_(True)


def _refuse(source: str, findings: list[Finding]) -> None:
    errors = [f"{finding.where}: {finding.what}" for finding in findings if finding.severity == "error"]
    if errors:
        raise CheckpointError(
            f"{source}: it would give meaningless answers:{_listed(errors)}",
            hint="the training diverged, or the file is damaged",
        )


def _listed(lines: list[str]) -> str:
    """One indented line each, the first of them when there are many."""
    more = len(lines) - _MOST_LISTED
    shown = lines[:_MOST_LISTED] + ([f"and {more} more"] if more > 0 else [])
    return "".join(f"\n  {line}" for line in shown)
