"""Export a checkpoint to a bundle, the folder that every later step reads.

The export loads the checkpoint and folds the masks: each mask is computed once and stored as a constant. The export
then writes the ONNX graph, and compares the logits of the runtimes on this machine with PyTorch's logits. If a step
fails, the export writes no bundle.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from gmmvit_deploy.bundle import artifacts
from gmmvit_deploy.bundle.artifacts import Bundle, Manifest, bundle_of_written_files
from gmmvit_deploy.bundle.golden import bytes_from_golden
from gmmvit_deploy.bundle.variants import open_variant
from gmmvit_deploy.checkpoints.loading import LoadedCheckpoint, load_checkpoint
from gmmvit_deploy.checkpoints.weights import bytes_from_model
from gmmvit_deploy.errors import ExportError, InputError, OutputError
from gmmvit_deploy.export.batch_proof import require_batches
from gmmvit_deploy.export.golden import golden_from_model
from gmmvit_deploy.export.numeric_proof import golden_features, golden_rows, proven_features, proven_programs
from gmmvit_deploy.export.onnx_from_model import OPSET, onnx_from_model
from gmmvit_deploy.export.options import ExportOptions
from gmmvit_deploy.export.outputs import output_records, require_outputs
from gmmvit_deploy.files.writing import new_folder, require_free, sha256_of_file
from gmmvit_deploy.graphs.proof import prove_folded
from gmmvit_deploy.graphs.roles import role_disagreements
from gmmvit_deploy.images.spec import ImageSpec
from gmmvit_deploy.models.families import family_of
from gmmvit_deploy.models.folding.fold import FoldedModel, fold
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.models.specs import ModelSpec
from gmmvit_deploy.progress import OnProgress, Progress, ignore
from gmmvit_deploy.runtimes.runners.open import proof_programs
from gmmvit_deploy.runtimes.runners.runner import Runner
from gmmvit_deploy.tolerances import Noise, limit_from_noise

__all__ = ["ExportOptions", "bundle_from_checkpoint"]

_STEPS = 5  # number of calls of `_Steps.begin` in an export


def bundle_from_checkpoint(
    checkpoint: Path | str,
    out: Path | str,
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
        OutputError: ``out`` exists and ``force`` is not set, ``out`` holds the checkpoint or is no earlier output, or
        writing fails.
    """
    checkpoint, out = Path(checkpoint), Path(out)
    require_free(out, force=force)
    if out.resolve() in checkpoint.resolve().parents:
        raise OutputError(f"{out} holds the checkpoint {checkpoint}", hint="type -o with another path")
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
        bundle = bundle_of_written_files(folder)
        # The comparison reads the graph and the golden logits from the files on disk, as every later step does.
        steps.begin("compare the runtimes with PyTorch")
        differences, skipped = _prove_numerically(bundle, loaded, noises)
        bundle.manifest.export_parity.update(differences)
        bundle.manifest.export_skipped.update(skipped)
        _write_manifest(folder, bundle.manifest)
        also(bundle)
    return replace(bundle, path=out)


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
    notes |= {f"gmmvit.mask_sha256.{mask.layer}": mask.constant_sha256 for mask in masks}
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
        task=options.agreed_task,
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
