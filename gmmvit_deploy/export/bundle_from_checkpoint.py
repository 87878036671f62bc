"""Export a checkpoint to a bundle, the folder that every later step reads.

The export loads the checkpoint and folds the masks: each mask is computed once and stored as a constant. The export
then writes the ONNX graph, and compares the logits of the runtimes on this machine with PyTorch's logits. If a step
fails, the export writes no bundle.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gmmvit_deploy import artifacts
from gmmvit_deploy.artifacts import Bundle, InputKind, Manifest, open_bundle
from gmmvit_deploy.checkpoints.loading import LoadedCheckpoint, load_checkpoint
from gmmvit_deploy.checkpoints.weights import bytes_from_model
from gmmvit_deploy.errors import ExportError, InputError
from gmmvit_deploy.export.batch_proof import require_batches
from gmmvit_deploy.export.golden import golden_from_model
from gmmvit_deploy.export.numeric_proof import golden_features, golden_rows, proven_features, proven_programs
from gmmvit_deploy.export.onnx_from_model import OPSET, onnx_from_model
from gmmvit_deploy.export.outputs import output_records, require_outputs
from gmmvit_deploy.families import family_of
from gmmvit_deploy.folding.fold import FoldedModel, fold
from gmmvit_deploy.golden import bytes_from_golden
from gmmvit_deploy.graphs.proof import prove_folded
from gmmvit_deploy.graphs.roles import role_disagreements
from gmmvit_deploy.images import ImageSpec
from gmmvit_deploy.labels import Task
from gmmvit_deploy.progress import OnProgress, Progress, ignore
from gmmvit_deploy.resize_rules import RESIZE_RULES, ResizeRule, crops, require_crop_pct, resize_rule_from
from gmmvit_deploy.runners.open import proof_programs
from gmmvit_deploy.runners.runner import Runner
from gmmvit_deploy.sources.hints import LoadHints
from gmmvit_deploy.sources.record import KnownImages
from gmmvit_deploy.specs import OUTPUTS, ModelSpec, OutputName
from gmmvit_deploy.tolerances import Noise, limit_from_noise
from gmmvit_deploy.variants import open_variant
from gmmvit_deploy.writing import new_folder, require_free, sha256_of_file

__all__ = ["ExportOptions", "bundle_from_checkpoint"]

_STEPS = 5  # number of calls of `_Steps.begin` in an export


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """The input and the labels of the network to export.

    input_kind: ``pixels`` or ``tensor``. A graph that takes ``pixels`` (uint8) normalises the images, so mean, std
    and labels are required. A graph that takes ``tensor`` (float32) expects normalised images; mean and std are then
    optional, and a server normalises its images with mean and std if given.
    max_batch: the largest batch that the bundle accepts.
    mean, std: the mean and the standard deviation of each channel, for pixel values scaled to [0, 1].
    resize: the rule by which the images were resized when the model was evaluated; None is ``stretch-bilinear``.
    crop_pct: the side of the crop divided by the side after resizing, as in `ImageSpec`; None is 1.
    labels: the class names in the order of the class index; with None, the names are the class indices from 0.
    outputs: the outputs of the network. Without logits, labels are neither required nor stored.
    task: the task of the network, which no checkpoint states.
    thresholds: for a multi-label network, the probability from which on an image has a label: a number for each label
    or a number for all labels; None for single-label.  thresholds_source: where they come from, for messages.
    A value that is None is first taken from the checkpoint, if the checkpoint states the value.
    Errors: InputError when ``max_batch`` is below 1, or when ``resize`` is not a rule or does not take ``crop_pct``.
    """

    input_kind: InputKind = "pixels"
    max_batch: int = 64
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    resize: ResizeRule | None = None
    crop_pct: float | None = None
    labels: tuple[str, ...] | None = None
    outputs: tuple[OutputName, ...] = ("logits",)
    task: Task = "single-label"
    thresholds: tuple[float, ...] | float | None = None
    thresholds_source: str = "--thresholds"

    @property
    def has_logits(self) -> bool:
        return "logits" in self.outputs

    def __post_init__(self) -> None:
        if self.outputs not in OUTPUTS:
            raise InputError(f"--outputs: expected logits, features or both, got {', '.join(self.outputs)}")
        if self.task == "multi-label" and not self.has_logits:
            raise InputError(
                "--task multi says how logits become labels, and --outputs features writes no logits",
                hint="leave --task out, or type --outputs both",
            )
        if self.task == "multi-label" and self.thresholds is None:
            raise InputError(
                "--task multi needs the probability from which on an image has a label, for each label",
                hint="add --thresholds FILE with a number for each label, or a number such as --thresholds 0.5",
            )
        if self.task == "single-label" and self.thresholds is not None:
            raise InputError(
                "--thresholds belongs to a multi-label network, and the task is single",
                hint="add --task multi, or leave --thresholds out",
            )
        if self.max_batch < 1:
            raise InputError(f"--max-batch: expected at least 1, got {self.max_batch}")
        if self.crop_pct is not None and self.resize is not None:
            require_crop_pct("--crop-pct", self.crop_pct, resize_rule_from(self.resize))

    def fitting_thresholds(self, labels: Sequence[str]) -> tuple[float, ...]:
        """Return the threshold of each label; empty for single-label.

        Errors: InputError when the number of thresholds is not that of the labels, or when a threshold is not between
        0 and 1.
        """
        if self.task == "single-label" or self.thresholds is None:
            return ()
        numbers = (self.thresholds,) * len(labels) if isinstance(self.thresholds, float) else self.thresholds
        if len(numbers) != len(labels):
            raise InputError(
                f"{self.thresholds_source}: expected {len(labels)} thresholds, one for each label, got {len(numbers)}",
                hint="write a number for each label, in the order of the labels",
            )
        for label, number in zip(labels, numbers, strict=True):
            if not 0 < number < 1:
                raise InputError(
                    f"{self.thresholds_source}: the threshold of {label}: expected a number above 0 and below 1, got "
                    f"{number:g}",
                    hint="a threshold is a probability, such as 0.5",
                )
        return numbers

    def completed(self, known: KnownImages, *, default: ResizeRule | None = "stretch-bilinear") -> ExportOptions:
        """Return the options with the values of the checkpoint in place of None.

        default: the resize rule if neither the checkpoint nor the user states a rule; None if the user must state the
        rule.
        Errors: InputError when ``input_kind`` is ``pixels`` and mean, std, labels or the resize rule are missing, or
        when the resize rule is not supported or does not take ``crop_pct``.
        """
        if self.resize is None and known.resize not in (None, *RESIZE_RULES):
            raise InputError(
                f"the checkpoint states the resize rule {known.resize}, which is not supported",
                hint=f"type --resize with the closest of {', '.join(RESIZE_RULES)}; another filter changes the logits",
            )
        rule = resize_rule_from(self.resize or known.resize or default or "stretch-bilinear")
        # A rule without crop, which the user typed, takes the place of the checkpoint's rule and crop.
        crop_pct = known.crop_pct if self.crop_pct is None and crops(rule) else self.crop_pct
        if crop_pct is not None:
            if self.crop_pct is None and crop_pct > 1:
                raise InputError(
                    f"the checkpoint states crop_pct {crop_pct:g}, and values above 1 are not supported",
                    hint="type --crop-pct 1 for the closest supported preprocessing, which changes the logits",
                )
            require_crop_pct("--crop-pct", crop_pct, rule)
        options = replace(
            self,
            mean=self.mean or known.mean,
            std=self.std or known.std,
            resize=rule,
            crop_pct=crop_pct,
            labels=self.labels or known.labels,
        )
        if options.input_kind == "pixels":
            needed = ("mean", "std", "labels") if self.has_logits else ("mean", "std")
            missing = [name for name in needed if getattr(options, name) is None]
            _require_stated(missing, not (self.resize or known.resize or default), known.usual_resize)
        return options


def _require_stated(missing: list[str], misses_resize: bool, usual_resize: str) -> None:
    """Check that the preprocessing and the labels are stated.

    missing: the missing values among mean, std and labels.  misses_resize: True if the resize rule is missing.
    usual_resize: the options for the usual resize rule of the architecture, for the hint; empty if not known.
    Errors: InputError when a value is missing; the hint names the options for the missing values only.
    """
    if not missing and not misses_resize:
        return
    names = [*missing, *(["resize rule"] if misses_resize else [])]
    options = [f"--{name}" for name in missing]
    normalisation = {"mean", "std"} & {*missing}
    to_type = [f"--dataset NAME, or {_listed(options)}"] if normalisation else options
    if misses_resize:
        usual = f", such as {usual_resize}, if the model was evaluated with timm's default" if usual_resize else ""
        to_type.append(f"--resize METHOD{usual}")
    methods = f". METHOD: {', '.join(RESIZE_RULES)}" if misses_resize else ""
    raise InputError(
        "--input pixels needs the mean, the std and the labels of training, and the resize rule of evaluation, because "
        f"the server prepares the images; the checkpoint does not state the {' and the '.join(names)}",
        hint=f"add {'; also add '.join(to_type)}; or add --input tensor to prepare the images outside the graph"
        f"{methods}",
    )


def _listed(options: list[str]) -> str:
    return options[0] if len(options) == 1 else f"{', '.join(options[:-1])} and {options[-1]}"


def bundle_from_checkpoint(
    checkpoint: Path,
    out: Path,
    options: ExportOptions,
    *,
    hints: LoadHints | None = None,
    check: Callable[[ImageSpec], object] = lambda image: None,
    also: Callable[[Bundle], object] = lambda bundle: None,
    force: bool = False,
    on_progress: OnProgress = ignore,
) -> Bundle:
    """Export a checkpoint to a bundle in the folder ``out``.

    hints: the description of the model, for a checkpoint that does not describe its model.
    check: called with the network's `ImageSpec` before the export begins; an error that ``check`` raises ends the
    export.
    also: called with the finished bundle before the bundle appears at ``out``; may write more files into the bundle.
    force: replace an existing folder at ``out``.
    on_progress: called at the beginning of each step.
    Errors, each of which leaves ``out`` unchanged:
        CheckpointError: the checkpoint cannot be loaded, or cannot be loaded safely.
        InputError: the number of labels, means or standard deviations does not fit the model, or a label is not valid.
        FoldError: the model does not meet the requirements of a folding pass, or the pass did not fold the model
        completely.
        ExportError: the exporter fails, a check of the graph fails, the difference of a runtime's logits from PyTorch's
        logits exceeds the limit, or no runtime on this machine can run the graph.
        OutputError: ``out`` exists and ``force`` is not set, or writing fails.
    """
    require_free(out, force=force)
    steps = _Steps(on_progress)
    steps.begin("read the checkpoint")
    loaded = load_checkpoint(checkpoint, hints)
    options = options.completed(loaded.images, default=family_of(loaded.spec).default_resize)
    image = _image(options, loaded.spec)
    loaded.model.outputs = options.outputs
    require_outputs(loaded)
    labels = _fitting_labels(options.labels, loaded.spec) if options.has_logits else ()
    options.fitting_thresholds(labels)
    check(image)
    steps.begin("fold the masks")
    folded = fold(loaded.model)
    with new_folder(out, force=force) as folder:
        manifest, noises = _write(folder, loaded, folded, options, image, labels, steps)
        _write_manifest(folder, manifest)
        # The comparison reads the bundle from the files on disk, as every later step does.
        steps.begin("compare the runtimes with PyTorch")
        differences, skipped = _prove_numerically(open_bundle(folder), loaded, noises)
        manifest.export_parity.update(differences)
        manifest.export_skipped.update(skipped)
        _write_manifest(folder, manifest)
        also(open_bundle(folder))
    return open_bundle(out)


class _Steps:
    """Counts the steps of an export, and reports each step to ``on_progress``."""

    def __init__(self, on_progress: OnProgress) -> None:
        self._on_progress = on_progress
        self._begun = 0

    def begin(self, step: str) -> None:
        self._on_progress(Progress(step, self._begun, _STEPS))
        self._begun += 1


def _fitting_labels(labels: tuple[str, ...] | None, spec: ModelSpec) -> tuple[str, ...]:
    if labels is None:
        return tuple(str(index) for index in range(spec.classes))
    if len(labels) != spec.classes:
        raise InputError(
            f"expected {spec.classes} labels, one for each class of the model, got {len(labels)}",
            hint="add --labels FILE; the file holds one label per line, in the order of the class index",
        )
    if broken := [label for label in labels if not label.strip() or "\n" in label or ":" in label]:
        # Triton's classification extension returns "score:index:label", where ":" in a label would be ambiguous.
        raise InputError(f"labels must not be empty, or contain ':' or a line break, got {broken[:3]}")
    return labels


def _image(options: ExportOptions, spec: ModelSpec) -> ImageSpec:
    """Return the network's `ImageSpec`.

    Errors: InputError when mean or std does not fit the channels, or when a rule ``border`` has no mean.
    """
    height, width = spec.image_shape
    return ImageSpec(
        height=height,
        width=width,
        channels=spec.channels,
        mean=options.mean,
        std=options.std,
        resize=options.resize or "stretch-bilinear",
        crop_pct=1.0 if options.crop_pct is None else options.crop_pct,
    )


def _write(
    folder: Path,
    loaded: LoadedCheckpoint,
    folded: FoldedModel,
    options: ExportOptions,
    image: ImageSpec,
    labels: Sequence[str],
    steps: _Steps,
) -> tuple[Manifest, tuple[Noise, ...]]:
    """Write all files except the manifest; return (the manifest, the float32 noise of each output)."""
    inside = image if options.input_kind == "pixels" else None
    steps.begin("export to ONNX")
    proto = onnx_from_model(folded.model, preprocessing=inside, max_batch=options.max_batch)
    masks, biases = prove_folded(proto, folded, foreign=folded.model.foreign)
    notes = {"gmmvit.checkpoint_sha256": loaded.file.sha256}
    notes |= {f"gmmvit.mask_sha256.{mask.layer}": mask.trained_sha256 for mask in masks}
    for key, value in notes.items():
        proto.metadata_props.add(key=key, value=value)
    (folder / artifacts.MODEL_FILE).write_bytes(proto.SerializeToString(deterministic=True))
    (folder / artifacts.WEIGHTS_FILE).write_bytes(bytes_from_model(loaded.model))
    steps.begin("compute the golden logits")
    golden, noises = golden_from_model(loaded.model, options.input_kind, image)
    (folder / artifacts.GOLDEN_FILE).write_bytes(bytes_from_golden(golden))
    (folder / artifacts.LABELS_FILE).write_text("".join(f"{label}\n" for label in labels), encoding="utf-8")
    manifest = Manifest(
        spec=loaded.spec,
        trainable_parameters=loaded.trainable_parameters,
        checkpoint={
            "name": loaded.file.path.name,
            "sha256": loaded.file.sha256,
            "wrapping": loaded.file.wrapping,
        },
        unused_keys=loaded.unused,
        taken_from=loaded.taken_from,
        input_kind=options.input_kind,
        max_batch=options.max_batch,
        image=image,
        task=options.task,
        thresholds=options.fitting_thresholds(labels),
        outputs=output_records(golden),
        labels=tuple(labels),
        opset=OPSET,
        folding=tuple(name for name, changed in folded.passes.items() if changed),
        masks=masks,
        biases=biases,
        role_disagreements=role_disagreements(proto.graph),
        export_parity={},
        export_skipped={},
        float32_noise=noises[0].largest,
        features_noise=noises[1].largest if len(noises) > 1 else 0.0,
        versions=artifacts.tool_versions(*family_of(loaded.spec).distributions),
        files={file.name: sha256_of_file(file) for file in sorted(folder.iterdir())},
    )
    return manifest, noises


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    text = json.dumps(manifest.to_json(), indent=1, ensure_ascii=False)
    (folder / artifacts.MANIFEST_FILE).write_text(text + "\n", encoding="utf-8")


def _prove_numerically(
    bundle: Bundle, loaded: LoadedCheckpoint, noises: tuple[Noise, ...]
) -> tuple[dict[str, float], dict[str, str]]:
    """Run ``model.onnx`` in ONNX Runtime and OpenVINO, and compare the logits with the golden logits.

    The golden logits are PyTorch's logits, recorded at export. Each runtime runs the graph twice: with the runtime's
    built-in operators, as the C++ backends of a Triton server do, and with this project's CPU kernels, as this
    project's Triton models do on CPUs. Each combination of runtime and operators is called a runner.
    Returns two dicts. The first maps ``<runner>_largest_abs`` to the largest difference of each runner, and ``limit``
    to the limit; for the features beside logits, ``<runner>_features_largest_abs`` and ``features_limit``. The second
    maps each skipped runner to the reason.
    Errors: ExportError as in `proven_programs`, and when every runner was skipped.
    """
    inputs, expected = golden_rows(bundle)
    # `limit_from_noise` limits the difference from the float64 logits. The golden logits are float32, and differ from
    # the float64 logits by at most the noise.
    limit = limit_from_noise(noises[0]).largest + noises[0].largest
    programs = proof_programs(bundle, open_variant(bundle, "fp32"))
    what = str(loaded.file.path)
    differences, skipped = proven_programs(programs, inputs, expected, limit, what=what)
    if not differences:
        raise ExportError(
            f"{what}: no runtime on this machine can run the exported graph: {'; '.join(skipped.values())}"
        )
    features: dict[str, float] = {}
    if len(noises) > 1:
        features["features_limit"] = limit_from_noise(noises[1]).largest + noises[1].largest
        expected_features = golden_features(bundle)
        for name in differences:
            with programs[name]() as runner:
                features[f"{name}_features_largest_abs"] = proven_features(
                    runner, inputs, expected_features, features["features_limit"], what=what
                )
    if loaded.model.foreign:
        _prove_batches(bundle, next(programs[name] for name in programs if name in differences), limit)
    logits = {f"{name}_largest_abs": difference for name, difference in differences.items()}
    return {**logits, "limit": limit, **features}, skipped


def _prove_batches(bundle: Bundle, open_program: Callable[[], Runner], limit: float) -> None:
    """Run the graph in several batch sizes.  Errors: ExportError as in `require_batches`."""
    inputs, expected = golden_rows(bundle)
    with open_program() as runner:
        require_batches(runner.run, inputs, expected, limit, max_batch=bundle.manifest.max_batch)
