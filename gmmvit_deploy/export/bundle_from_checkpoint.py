"""Checkpoint → bundle: load, fold, export and check; write the whole bundle, or nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gmmvit_deploy import artifacts
from gmmvit_deploy.artifacts import Bundle, InputKind, Manifest, OutputRecord, open_bundle
from gmmvit_deploy.checkpoints.loading import LoadedCheckpoint, load_checkpoint
from gmmvit_deploy.checkpoints.weights import bytes_from_model
from gmmvit_deploy.errors import ExportError, InputError
from gmmvit_deploy.export.golden import golden_from_model
from gmmvit_deploy.export.numeric_proof import golden_rows, proven_programs
from gmmvit_deploy.export.onnx_from_model import OPSET, OUTPUT_NAME, onnx_from_model
from gmmvit_deploy.folding.fold import FoldedModel, fold
from gmmvit_deploy.golden import bytes_from_golden
from gmmvit_deploy.graphs.proof import prove_folded
from gmmvit_deploy.graphs.roles import role_disagreements
from gmmvit_deploy.images import ImageSpec, ResizeRule
from gmmvit_deploy.progress import OnProgress, Progress, ignore
from gmmvit_deploy.runners.open import proof_programs
from gmmvit_deploy.sources.hints import LoadHints
from gmmvit_deploy.specs import ModelSpec
from gmmvit_deploy.tolerances import Noise, limit_from_noise
from gmmvit_deploy.variants import open_variant
from gmmvit_deploy.writing import new_folder, require_free, sha256_of_file

__all__ = ["ExportOptions", "bundle_from_checkpoint"]

_STEPS = 5  # number of calls of `_Steps.begin` in an export


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """The exported network's input, and its labels.

    input_kind: ``pixels`` (uint8, normalised inside the graph) needs mean, std and labels;
    ``tensor`` (float32, normalised by the caller) accepts them too, so that a server can normalise.
    max_batch: largest batch of the bundle.  mean, std: a number for each channel of the network, for values in [0, 1].
    resize: as in training.  labels: in the order of the class index; None numbers the classes.
    """

    input_kind: InputKind = "pixels"
    max_batch: int = 64
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    resize: ResizeRule = "stretch-bilinear"
    labels: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.max_batch < 1:
            raise InputError(f"--max-batch is {self.max_batch}; expected at least 1")
        if self.input_kind == "pixels" and (None in (self.mean, self.std, self.labels)):
            raise InputError(
                "a graph that takes pixels normalises them, so it needs mean, std and labels of training",
                hint="--dataset NAME, or all of --mean --std --labels; or --input tensor to normalise outside",
            )


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

    hints: how to read a checkpoint that does not describe its model.
    check: called with the network's `ImageSpec` before the export begins; an error that it raises ends the export.
    also: called with the finished bundle to write more files into it, before the bundle appears at ``out``.
    force: replace a folder that exists at ``out``.
    Errors: CheckpointError; FoldError; ExportError; OutputError; InputError when the labels, or mean and std, do not
    fit the model. After any error, ``out`` is unchanged.
    """
    require_free(out, force=force)
    steps = _Steps(on_progress)
    steps.begin("read the checkpoint")
    loaded = load_checkpoint(checkpoint, hints)
    image = _image(options, loaded.spec)
    labels = _fitting_labels(options.labels, loaded.spec)
    check(image)
    steps.begin("fold the masks")
    folded = fold(loaded.model)
    with new_folder(out, force=force) as folder:
        manifest, noise = _write(folder, loaded, folded, options, image, labels, steps)
        _write_manifest(folder, manifest)
        # The check opens the files from disk, as every later step does.
        steps.begin("compare the runtimes with PyTorch")
        differences, skipped = _prove_numerically(open_bundle(folder), loaded, noise)
        manifest.export_parity.update(differences)
        manifest.export_skipped.update(skipped)
        _write_manifest(folder, manifest)
        also(open_bundle(folder))
    return open_bundle(out)


class _Steps:
    """Reports the steps of an export to ``on_progress``, with their number."""

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
            f"{len(labels)} labels were given for a model of {spec.classes} classes",
            hint="--labels takes a file with one label a line, in the order of the class index",
        )
    if broken := [label for label in labels if not label.strip() or "\n" in label or ":" in label]:
        # The classification extension answers "score:index:label".
        raise InputError(f"labels must not be empty or hold ':' or a line break, got {broken[:3]}")
    if len(set(labels)) != len(labels):
        raise InputError(f"labels repeat: {sorted({x for x in labels if labels.count(x) > 1})[:3]}")
    return labels


def _image(options: ExportOptions, spec: ModelSpec) -> ImageSpec:
    """Errors: InputError when mean and std are not a number for each channel of the model."""
    side = spec.image_size
    return ImageSpec(
        height=side, width=side, channels=spec.channels, mean=options.mean, std=options.std, resize=options.resize
    )


def _write(
    folder: Path,
    loaded: LoadedCheckpoint,
    folded: FoldedModel,
    options: ExportOptions,
    image: ImageSpec,
    labels: Sequence[str],
    steps: _Steps,
) -> tuple[Manifest, Noise]:
    """Write all files but the manifest.  Returns (the manifest, the model's float32 noise)."""
    inside = image if options.input_kind == "pixels" else None
    steps.begin("export to ONNX")
    proto = onnx_from_model(folded.model, preprocessing=inside, max_batch=options.max_batch)
    masks, biases = prove_folded(proto, folded)
    notes = {"gmmvit.checkpoint_sha256": loaded.file.sha256}
    notes |= {f"gmmvit.mask_sha256.{mask.layer}": mask.trained_sha256 for mask in masks}
    for key, value in notes.items():
        proto.metadata_props.add(key=key, value=value)
    (folder / artifacts.MODEL_FILE).write_bytes(proto.SerializeToString(deterministic=True))
    (folder / artifacts.WEIGHTS_FILE).write_bytes(bytes_from_model(loaded.model))
    steps.begin("compute the golden logits")
    golden, noise = golden_from_model(loaded.model, options.input_kind, image)
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
        input_kind=options.input_kind,
        max_batch=options.max_batch,
        image=image,
        task="single-label",
        outputs=(OutputRecord(name=OUTPUT_NAME, shape=(loaded.spec.classes,), meaning="class logits"),),
        labels=tuple(labels),
        opset=OPSET,
        folding=tuple(name for name, changed in folded.passes.items() if changed),
        masks=masks,
        biases=biases,
        role_disagreements=role_disagreements(proto.graph),
        export_parity={},
        export_skipped={},
        float32_noise=noise.largest,
        versions=artifacts.tool_versions(),
        files={file.name: sha256_of_file(file) for file in sorted(folder.iterdir())},
    )
    return manifest, noise


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    text = json.dumps(manifest.to_json(), indent=1, ensure_ascii=False)
    (folder / artifacts.MANIFEST_FILE).write_text(text + "\n", encoding="utf-8")


def _prove_numerically(
    bundle: Bundle, loaded: LoadedCheckpoint, noise: Noise
) -> tuple[dict[str, float], dict[str, str]]:
    """Run ``model.onnx`` in ONNX Runtime and OpenVINO, plain and with our kernels, and compare with the golden logits.

    Other runtimes, such as the backends of a Triton server, load the plain file; the programs with our kernels are
    those that this project serves on CPUs.
    Returns (each runner's largest difference and the limit, runner → reason why it was skipped).
    Errors: ExportError as `proven_programs`, and when every program was skipped.
    """
    inputs, expected = golden_rows(bundle)
    # The limit counts from exact logits; the stored logits may differ from these by the float32 noise.
    limit = limit_from_noise(noise).largest + noise.largest
    programs = proof_programs(bundle, open_variant(bundle, "fp32"))
    what = str(loaded.file.path)
    differences, skipped = proven_programs(programs, inputs, expected, limit, what=what)
    if not differences:
        raise ExportError(f"{what}: no runtime here can prove its graph: {'; '.join(skipped.values())}")
    return {**{f"{name}_largest_abs": difference for name, difference in differences.items()}, "limit": limit}, skipped
