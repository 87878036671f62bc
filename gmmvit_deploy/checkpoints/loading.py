"""Load a checkpoint file into a model.  Every key of the file is used, known to be unused, or refused."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from gmmvit_deploy.checkpoints._fitting import (
    FittedFile,
    backbone_of,
    errors_that_name,
    fitted_file,
    refuse_misfits,
)
from gmmvit_deploy.checkpoints._model_folder import read_checkpoint, with_linear_head
from gmmvit_deploy.checkpoints._other_files import refuse_adapter
from gmmvit_deploy.checkpoints._wrapping import prefix_of_network
from gmmvit_deploy.checkpoints._zero_shot import refuse_prompts, with_text_classes
from gmmvit_deploy.checkpoints.audit import audit_dead_masks, audit_model, audit_tensors
from gmmvit_deploy.checkpoints.own_class import load_own_class, refuse_own_options, require_same_class
from gmmvit_deploy.checkpoints.reading import TensorFile, under_prefix
from gmmvit_deploy.checkpoints.weights import as_float32, filled_model, listed, tensor_from_file
from gmmvit_deploy.errors import CheckpointError, InputError, SpecError
from gmmvit_deploy.images.spec import image_from_json
from gmmvit_deploy.models.families import (
    FAMILIES,
    PRESETS,
    Family,
    family_of,
    family_of_preset,
    preset_spec,
    spec_from_json,
)
from gmmvit_deploy.models.families.counting import multiply_accumulates, trainable_parameters
from gmmvit_deploy.models.families.custom import CustomSpec
from gmmvit_deploy.models.families.hugging_face.checkpoint import HUGGING_FACE_FILES
from gmmvit_deploy.models.families.timm.checkpoint import DEIT3_FILES, DINOV2_FILES, TIMM_FILES
from gmmvit_deploy.models.families.timm.network import is_timm_name
from gmmvit_deploy.models.families.timm.spec import CONV_STEM_VIT
from gmmvit_deploy.models.families.timm.torchvision_files import TORCHVISION_FILES
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.scores.step import Oddity
from gmmvit_deploy.models.sources.hints import LoadHints, own_class_of
from gmmvit_deploy.models.sources.record import KnownImages
from gmmvit_deploy.models.sources.shapes import check_image_hints, preset_differences
from gmmvit_deploy.models.sources.source import CheckpointSource, origin_keys
from gmmvit_deploy.models.specs import Interpolation, ModelSpec, spec_to_json

__all__ = ["LoadedCheckpoint", "describe_checkpoint", "load_checkpoint", "released_state_dict"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCheckpoint:
    """The result of `load_checkpoint`.

    file: the file, without its tensors.  model: the trained model in evaluation mode, float32, on the CPU.
    unused: key of the file → the reason why the network never reads the tensor.  findings: the results of the audit.
    images: what the checkpoint states about the images of training.
    taken_from: what no tensor shows, such as ``heads`` → where the value comes from, such as ``--set heads=4``.
    """

    file: TensorFile
    spec: ModelSpec
    model: Model
    unused: dict[str, str]
    findings: tuple[Oddity, ...]
    images: KnownImages = field(default_factory=KnownImages)
    taken_from: dict[str, str] = field(default_factory=dict)

    @property
    def trainable_parameters(self) -> int:
        return trainable_parameters(self.model)


def load_checkpoint(path: Path | str, hints: LoadHints | None = None) -> LoadedCheckpoint:
    """Read the file, infer the spec, build the model, fill in the weights, and audit the weights.

    Example: ``load_checkpoint("checkpoint.pth").spec``; a class of timm: ``LoadHints(model="vit_tiny_patch16_224")``.

    hints: the user's values for properties of the model that the tensors of the file do not show.
    Errors:
        CheckpointError: the file cannot be read safely; its architecture is unknown; keys are missing or unknown; a
            tensor has an unexpected shape or data type; the model would use NaN or infinite values; the file holds
            several sets of weights and no hint chooses one of them; a hint contradicts the file; or the model
            cannot be resized to ``hints.resize_to``.
        SpecError: the preset is unknown, or timm cannot build the model.
        InputError: the file or the class that ``hints.model`` names cannot be used.
    """
    hints = hints or LoadHints()
    file = read_checkpoint(Path(path), hints.weights)
    if hints.prompts:
        refuse_prompts(file)
    own_class = own_class_of(hints.model)
    if file.has_own_names:
        return _load_own(file, hints)
    if own_class is not None:
        model, used, file = load_own_class(file, hints, *own_class)
        model = _resized(model, hints, interpolation=None, source=str(path))
        return _audited(file, model, used=used, unused={})
    refuse_adapter(file.path, file.tensors)  # a class of one's own may have layers of LoRA
    given, name = hints, str(path)
    file = _network_of(as_float32(file, keep={"torch.float64"}))
    proof = None
    if hints.prompts:
        file, proof = with_text_classes(file, hints)
    source, hints, fitted = _fitted(file, given, name)
    file, shapes, spec, origins = fitted.file, fitted.shapes, fitted.spec, fitted.origins
    model = filled_model(spec, {ours: tensor_from_file(origin, file.tensors) for ours, origin in origins.items()})
    resized = _resized(model, hints, interpolation=source.interpolation(shapes, hints), source=name)
    used = {key for origin in origins.values() for key in origin_keys(origin)}
    loaded = _audited(file, resized, used=used, unused=fitted.unused)
    taken = {**shapes.taken_from, **fitted.taken_from, **given.typed()}
    loaded = replace(loaded, images=source.images(shapes, hints, spec), taken_from=taken)
    del file, shapes, fitted  # frees the memory of the file's tensors, which the proof needs
    with errors_that_name(name):
        _family_of_source(source).proof(model)
    if proof is not None:
        proof.require_equal_logits(model, source=name)
    return loaded


def _fitted(file: TensorFile, hints: LoadHints, name: str) -> tuple[CheckpointSource, LoadHints, FittedFile]:
    """Return the fit of a file (`_fitted_network`), or else of the network and the classifier in it (`backbone_of`)."""
    try:
        return _fitted_network(file, hints, name)
    except InputError:
        # timm takes any names; a file that another source recognises is no backbone of timm.
        signed = any(source.signature for source in _recognising(file))
        backbone = None if hints.head is not None or signed else backbone_of(file)
        if backbone is None:
            raise
    file, classifier = backbone
    source, hints, fitted = _fitted_network(file, hints, name)
    return source, hints, replace(fitted, taken_from={**fitted.taken_from, "classifier": classifier})


def _recognising(file: TensorFile) -> list[CheckpointSource]:
    return [source for family in FAMILIES for source in family.sources if source.recognises(file.tensors)]


def _fitted_network(file: TensorFile, hints: LoadHints, name: str) -> tuple[CheckpointSource, LoadHints, FittedFile]:
    """Return (the source of a file of one network, the hints with what the file states, the fit)."""
    if hints.head is not None:
        file, hints = with_linear_head(file, Path(hints.head), hints)
    source = _source_of(file, hints)
    try:
        _check_options(name, source, hints, file.tensors)
    except CheckpointError:
        _refuse_incomplete(file, source, hints)
        raise
    family = _family_of_source(source)
    _check_preset(family, hints)
    if hints.closed_form and "gmm" not in family.mask_kinds:
        raise CheckpointError(
            f"{name}: --set closed_form=yes is for Gaussian mixture masks, and {family.name} has no such mask",
            hint="leave --set closed_form out",
        )

    def check(spec: ModelSpec) -> None:
        check_image_hints(name, hints, image_size=spec.image_size, channels=spec.channels, evidence="its tensors show")
        _compare_with_preset(spec, hints, name)

    try:
        return source, hints, fitted_file(file, name, source, hints, check)
    except SpecError:
        _refuse_incomplete(file, source, hints)
        raise
    except CheckpointError as exc:
        if source is TIMM_FILES and hints.model is not None and (others := _other_sources(file)):
            exc.hint = f"omit --model: the names of the tensors are those of {' or of '.join(others)}"
        raise


def _check_options(path: str, source: CheckpointSource, hints: LoadHints, names: Iterable[str]) -> None:
    """Errors: CheckpointError for an option that the source does not read, or for the name of another source."""
    refuse_own_options(path, hints, reason=f"a file of {source.name}", allowed=(*source.own_hints, "source"))
    if hints.source is not None and not source.is_named(hints.source, names):
        raise CheckpointError(
            f"{path}: --set source={hints.source}, but the names of the tensors are those of {source.name}",
            hint="leave --set source out",
        )


def _network_of(file: TensorFile) -> TensorFile:
    prefix = prefix_of_network(file.path, {name: tuple(tensor.shape) for name, tensor in file.tensors.items()})
    return under_prefix(file, prefix) if prefix and not file.record.of_transformers else file


def _source_of(file: TensorFile, hints: LoadHints) -> CheckpointSource:
    """Return the checkpoint source (the code that wrote the file) that recognises the file.

    Unless the user or the file names a model, the source with the longest signature that fits the names of the tensors;
    ``hints.source`` chooses between equally long ones.
    Errors: CheckpointError when the user must choose.
    """
    if file.record.of_transformers:
        return HUGGING_FACE_FILES
    if hints.model == CONV_STEM_VIT:
        return TORCHVISION_FILES
    for source in (DINOV2_FILES, DEIT3_FILES):
        if source.recognises(file.tensors):
            return source
    if hints.model is not None or file.record.config:
        return TIMM_FILES
    sources = _recognising(file)
    longest = max(len(source.signature) for source in sources)
    possible = [source for source in sources if len(source.signature) == longest]
    stated = (file.record.entries.get("arch"), file.record.args.get("model"))
    if TIMM_FILES not in possible and hints.preset is None and any(map(is_timm_name, stated)):
        # Some scripts store their default name beside a network of another code, so timm's network must fit.
        with suppress(InputError):
            fitted_file(file, str(file.path), TIMM_FILES, hints, lambda spec: None)
            return TIMM_FILES
    if hints.source is not None:
        # `_check_options` refuses a value that names no possible source.
        possible = [source for source in possible if source.is_named(hints.source, file.tensors)] or possible
    if len(possible) > 1:
        options = sorted({source.option for source in possible})
        raise CheckpointError(
            f"{file.path}: the names of the tensors are those of {' and of '.join(s.name for s in possible)}, which "
            "compute different logits from the same weights",
            hint=f"type --set source={' or --set source='.join(options)}: the code that trained the model",
        )
    return possible[0]


def _other_sources(file: TensorFile) -> list[str]:
    """Return the names of the sources that recognise a file whose tensors do not have timm's names."""
    possible = _recognising(file)
    best = max(possible, key=lambda source: len(source.signature))  # TIMM_FILES, without signature, takes every file
    if any(source is best for source in _family_of_source(TIMM_FILES).sources):
        return []
    return [source.name for source in possible if len(source.signature) == len(best.signature)]


def _refuse_incomplete(file: TensorFile, source: CheckpointSource, hints: LoadHints) -> None:
    """Errors: CheckpointError for a file left to timm that names a preset, but lacks a tensor of its source."""
    if source is not TIMM_FILES or hints.model is not None:
        return
    for preset in (file.record.entries.get("arch"), file.record.args.get("model")):
        if not isinstance(preset, str) or preset not in PRESETS:
            continue
        family = family_of_preset(preset)
        missing = min((source.missing(file.tensors) for source in family.sources), key=len)
        if missing:
            raise CheckpointError(
                f"{file.path}: the file states that it is the preset {preset} of the family {family.name}, but has no "
                f"tensor {' and no tensor '.join(missing)}",
                hint="give the file that training wrote, complete and unchanged; for an architecture of timm, type "
                "--model with timm's name",
            )


def _family_of_source(source: CheckpointSource) -> Family:
    return next(family for family in FAMILIES if any(own is source for own in family.sources))


def _check_preset(family: Family, hints: LoadHints) -> None:
    """Errors: SpecError when the preset is unknown, CheckpointError when it belongs to another family than the file."""
    if hints.preset is None:
        return
    other = family_of_preset(hints.preset)
    if other is not family:
        raise CheckpointError(
            f"the file has the family {family.name}, but the preset {hints.preset} has the family {other.name}",
            hint=f"omit --preset, or type a preset of the family {family.name}: {', '.join(family.presets)}"
            if family.presets
            else f"omit --preset, because the family {family.name} has no presets; if gmmvit then asks for the number "
            "of heads, type --set heads=N",
        )


def _compare_with_preset(spec: ModelSpec, hints: LoadHints, source: str) -> None:
    if hints.preset is None:
        return
    preset = preset_spec(hints.preset, classes=spec.classes, image_size=spec.image_size, mask=spec.mask)
    if differing := preset_differences(spec, preset):
        raise CheckpointError(
            f"{source}: the file does not match the preset {hints.preset}: {', '.join(differing)}",
            hint=f"omit --preset {hints.preset}, or type the preset that the model was trained with",
        )


def _load_own(file: TensorFile, hints: LoadHints) -> LoadedCheckpoint:
    """Load the weights file of a bundle, or a checkpoint of ``gmmvit train``: both contain the model spec."""
    spec, source = spec_from_json(file.spec_json() or {}), str(file.path)
    evidence = "the spec stored in the file has"
    require_same_class(spec, hints, what=source)
    refuse_own_options(
        source,
        hints,
        reason="a file that holds the spec of the model, as gmmvit export and gmmvit train write it",
        allowed=("model_args",) if isinstance(spec, CustomSpec) else (),
    )
    check_image_hints(source, hints, image_size=spec.image_size, channels=spec.channels, evidence=evidence)
    if hints.heads not in (None, spec.first_heads):
        raise CheckpointError(
            f"{source}: --set heads={hints.heads}, but {evidence} {spec.first_heads}",
            hint=f"omit --set heads, or type --set heads={spec.first_heads}",
        )
    if hints.closed_form not in (None, spec.mask.closed_form):
        raise CheckpointError(
            f"{source}: {hints.typed()['closed_form']} was given, but {evidence} a {spec.mask} mask",
            hint="leave --set closed_form out",
        )
    _check_preset(family_of(spec), hints)
    _compare_with_preset(spec, hints, source)
    refuse_misfits(file, spec, None, {})
    model = _resized(filled_model(spec, file.tensors), hints, interpolation=None, source=source)
    return replace(_audited(file, model, used=set(file.tensors), unused={}), images=_own_images(file, model.spec))


def _own_images(file: TensorFile, spec: ModelSpec) -> KnownImages:
    """Return the preprocessing and the class names that a checkpoint of ``gmmvit train`` states."""
    stated = file.images_json()
    if stated is None:
        return KnownImages()
    try:
        image, labels = image_from_json(stated["image"]), tuple(map(str, stated["labels"]))
    except (TypeError, KeyError, AttributeError, InputError) as exc:
        raise CheckpointError(f"{file.path}: the preprocessing that the file states is not valid: {exc}") from exc
    if len(labels) != spec.classes or image.channels != spec.channels:
        raise CheckpointError(
            f"{file.path}: the file states {len(labels)} labels and {image.channels} channels, but its model has "
            f"{spec.classes} classes and {spec.channels} channels"
        )
    known = KnownImages(mean=image.mean, std=image.std, resize=image.resize, crop_pct=image.crop_pct, labels=labels)
    return replace(known, origins=dict.fromkeys(("mean", "std", "resize", "crop_pct", "labels"), "gmmvit train"))


def _audited(file: TensorFile, model: Model, *, used: set[str], unused: dict[str, str]) -> LoadedCheckpoint:
    """Audit the tensors and the model.  used: the keys that the model reads.  unused: the others, with the reason."""
    file = as_float32(file, keep={str(tensor.dtype) for tensor in model.state_dict().values()})
    findings = list(audit_tensors(file.tensors, used=used))
    _refuse(str(file.path), findings)
    findings += audit_model(model, unused={key: file.tensors[key] for key in unused})
    _refuse(str(file.path), findings)
    return LoadedCheckpoint(
        file=replace(file, tensors={}),
        spec=model.spec,
        model=model,
        unused={**unused, **file.left_out},
        findings=tuple(findings),
    )


def describe_checkpoint(loaded: LoadedCheckpoint) -> dict[str, Any]:
    """Return as JSON values what the file, its model and its spec are, the unused keys, and the audit findings.

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


def released_state_dict(model: Model) -> dict[str, Tensor]:
    """Return the state dict of this model under the names of the paper authors' code, without unread base masks."""
    state = model.state_dict()
    origins = family_of(model.spec).sources[0].tensors(model.spec, state)
    return {key: state[ours] for ours, key in origins.items() if isinstance(key, str)}


def _refuse(source: str, findings: list[Oddity]) -> None:
    errors = [f"{finding.where}: {finding.what}" for finding in findings if finding.severity == "error"]
    if errors:
        raise CheckpointError(
            f"{source}: the audit refuses this file, because every result of the model would be meaningless:"
            f"{listed(errors)}",
            hint="use another checkpoint: the training diverged, or the file is damaged",
        )


def _resized(model: Model, hints: LoadHints, *, interpolation: Interpolation | None, source: str) -> Model:
    """Return the model for images of ``hints.resize_to``.  interpolation: of the file, if the user names none."""
    if hints.resize_to is None:
        return model
    spec, size = model.spec, (hints.resize_to, hints.resize_to)
    what = f"{source}: --resize-to {hints.resize_to}"
    if spec.image_shape == size:
        raise CheckpointError(
            f"{what}: the model already takes images of {size[0]} × {size[1]} pixels, so nothing would change",
            hint="leave --resize-to out",
        )
    if spec.resizing:
        raise CheckpointError(
            f"{what}: the model was already {spec.resizing}; resampling twice gives another network than resampling "
            "once",
            hint="type gmmvit export with the checkpoint of the training",
        )
    resize = family_of(spec).resized
    if resize is None:
        supported = " and ".join(family.name for family in FAMILIES if family.resized is not None)
        raise CheckpointError(
            f"{what}: only models of the family {supported} can be resized; the code base of {spec.description} models "
            "has no algorithm that resamples position embeddings and biases for another image size",
            hint="leave --resize-to out; gmmvit then exports the model at the image size of the training",
        )
    try:
        return resize(model, size, hints.interpolation or interpolation)
    except InputError as exc:
        raise CheckpointError(f"{what}: {exc}", hint=exc.hint) from exc
