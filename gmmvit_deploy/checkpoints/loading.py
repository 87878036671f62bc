"""Checkpoint file → the trained model, with every key of the file accounted for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from gmmvit_deploy.checkpoints.audit import Finding, audit_model, audit_tensors
from gmmvit_deploy.checkpoints.families import family_of, known_unused, released_names
from gmmvit_deploy.checkpoints.hints import LoadHints
from gmmvit_deploy.checkpoints.inference import Shapes, check_image_hints, compared_with_preset, preset_of
from gmmvit_deploy.checkpoints.reading import TensorFile, read_tensors
from gmmvit_deploy.checkpoints.weights import filled_model, listed, misfits
from gmmvit_deploy.errors import CheckpointError
from gmmvit_deploy.models.build import Model
from gmmvit_deploy.models.counting import trainable_parameters
from gmmvit_deploy.specs import FAMILIES, ModelSpec, spec_from_json

__all__ = ["LoadedCheckpoint", "load_checkpoint", "released_state_dict"]


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
    misses keys, holds keys nobody knows, tensors of another shape or type, NaN and infinities, or
    contradicts a hint.
    """
    file = read_tensors(path)
    if file.has_own_names:
        return _load_own(file, hints or LoadHints())
    hints = _with_own_spec(file, hints or LoadHints())
    source = str(path)
    family = family_of(file.tensors)
    if family is None:
        raise CheckpointError(
            f"{path}: unknown architecture; its first keys are {', '.join(list(file.tensors)[:4])}",
            hint=f"known are the released code's {', '.join(FAMILIES)}, plain and masked",
        )
    spec: ModelSpec = family.infer_spec(Shapes(file.tensors, source, channels=hints.channels), hints)
    check_image_hints(source, hints, image_size=spec.image_size, channels=spec.channels, evidence="its tensors tell")
    names = released_names(spec)
    unused = {key: why for key, why in known_unused(spec).items() if key in file.tensors}
    _refuse_misfits(file, spec, names, unused)
    model = filled_model(spec, {ours: file.tensors[theirs] for ours, theirs in names.items()})
    return _audited(file, model, used=set(names.values()), unused=unused)


def _load_own(file: TensorFile, hints: LoadHints) -> LoadedCheckpoint:
    """The weights file of a bundle: its spec stands in it, and hints can only agree with that."""
    spec, source = spec_from_json(file.spec_json() or {}), str(file.path)
    evidence = "its own spec has"
    check_image_hints(source, hints, image_size=spec.image_size, channels=spec.channels, evidence=evidence)
    if hints.heads not in (None, _first(spec.heads)):
        raise CheckpointError(f"{source}: --heads {hints.heads}, but {evidence} {_first(spec.heads)}")
    if hints.closed_form and not spec.mask.closed_form:
        raise CheckpointError(f"{source}: --mask-form closed, but {evidence} a {spec.mask} mask")
    preset = preset_of(hints, type(spec), classes=spec.classes, image_size=spec.image_size, mask=spec.mask)
    compared_with_preset(spec, preset, name=hints.preset, source=source)
    _refuse_misfits(file, spec, {}, {})
    return _audited(file, filled_model(spec, file.tensors), used=set(file.tensors), unused={})


def _audited(file: TensorFile, model: Model, *, used: set[str], unused: dict[str, str]) -> LoadedCheckpoint:
    """Errors: CheckpointError when values make every answer meaningless."""
    findings = list(audit_tensors(file.tensors, used=used))
    _refuse(str(file.path), findings)
    findings += audit_model(model, unused={key: file.tensors[key] for key in unused})
    _refuse(str(file.path), findings)
    return LoadedCheckpoint(file=file, spec=model.spec, model=model, unused=unused, findings=tuple(findings))


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


def _refuse_misfits(file: TensorFile, spec: ModelSpec, names: Mapping[str, str], unused: Mapping[str, str]) -> None:
    """Every key is used, or known to be unused; or an error lists it.  names: our name → name in the file."""
    problems = misfits(spec, {key: tensor for key, tensor in file.tensors.items() if key not in unused}, names)
    if problems:
        raise CheckpointError(
            f"{file.path}: read as {spec.family} with {spec.mask} mask, {len(problems)} keys do not fit:"
            + listed(problems),
            hint="the file and the architecture must agree key by key; nothing is filled in or left out silently",
        )


def _refuse(source: str, findings: list[Finding]) -> None:
    errors = [f"{finding.where}: {finding.what}" for finding in findings if finding.severity == "error"]
    if errors:
        raise CheckpointError(
            f"{source}: it would give meaningless answers:{listed(errors)}",
            hint="the training diverged, or the file is damaged",
        )
