"""Export a checkpoint to a bundle, the folder that every later step reads.

The export loads the checkpoint and folds the masks: each mask is computed once and stored as a constant. The export
then writes the ONNX graph, and compares the logits of the runtimes on this machine with PyTorch's logits. If a step
fails, the export writes no bundle.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gmmvit_deploy.arguments import Refusals
from gmmvit_deploy.bundle import artifacts
from gmmvit_deploy.bundle.artifacts import MEANINGS, Bundle, Manifest, OutputRecord
from gmmvit_deploy.bundle.golden import GoldenSet, bytes_from_golden
from gmmvit_deploy.bundle.variants import open_variant
from gmmvit_deploy.checkpoints.loading import LoadedCheckpoint, load_checkpoint
from gmmvit_deploy.checkpoints.reading import weights_bytes
from gmmvit_deploy.checkpoints.weights import bytes_from_model
from gmmvit_deploy.errors import ExportError, InputError, OutputError
from gmmvit_deploy.exporting._numeric_proof import Proven, proven_programs, require_batches
from gmmvit_deploy.exporting.golden import golden_from_model
from gmmvit_deploy.exporting.onnx_from_model import OPSET, onnx_from_model
from gmmvit_deploy.exporting.options import ExportOptions
from gmmvit_deploy.exporting.other_classes import bundle_of_same_tower, with_other_classes
from gmmvit_deploy.exporting.variants import CALIBRATION_IMAGES, variants_from_bundle, variants_of_same_tower
from gmmvit_deploy.files.writing import new_folder, require_free, sha256_of_file
from gmmvit_deploy.graphs.folded import prove_classes, prove_folded
from gmmvit_deploy.graphs.weights import write_graph
from gmmvit_deploy.images.names import clean_name
from gmmvit_deploy.inference.labels import LabelSet
from gmmvit_deploy.inference.precision import Precision
from gmmvit_deploy.inference.runner_name import KERNELS_SUFFIX
from gmmvit_deploy.models.families import family_of
from gmmvit_deploy.models.folding.fold import fold
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.models.specs import ModelSpec, input_shape
from gmmvit_deploy.precision_names import precisions_from
from gmmvit_deploy.progress import OnProgress, Progress, ignore
from gmmvit_deploy.runtimes.programs.image_batches import require_images
from gmmvit_deploy.runtimes.programs.memory import available_bytes, release_memory
from gmmvit_deploy.runtimes.runners.open import proof_programs
from gmmvit_deploy.tolerances import Noise, limit_from_stored

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["ExportOptions", "bundle_from_checkpoint"]

_GIB = 2**30
_STEPS = (
    "read the checkpoint",
    "compute the reference outputs",
    "fold what is constant",
    "export to ONNX",
    "compare the runtimes with PyTorch",
)


def bundle_from_checkpoint(
    checkpoint: Path | str,
    out: Path | str,
    options: ExportOptions,
    *,
    hints: LoadHints | None = None,
    precisions: str | Sequence[Precision] = (),
    calibration: str | None = None,
    calibration_images: int = CALIBRATION_IMAGES,
    force: bool = False,
    on_progress: OnProgress = ignore,
) -> Bundle:
    """Export a checkpoint to a bundle in the folder ``out``.

    Example: ``bundle_from_checkpoint("checkpoint.pth", "bundle", ExportOptions(mean=(0.5,) * 3, std=(0.5,) * 3))``.

    hints: the description of the model, for a checkpoint that does not describe its model.
    precisions, calibration, calibration_images: the other precisions whose graphs the bundle also gets, as in
    `variants_from_bundle`.
    force: replace an existing folder at ``out``. If it is a bundle of the same CLIP or SigLIP, made with the same
    options and versions, only the classes are written anew: in ``model.onnx``, and in the graphs of other precisions
    than ``precisions`` (`exporting.other_classes`).
    on_progress: called at the beginning of each step.
    Errors, each of which leaves ``out`` unchanged:
        CheckpointError: the checkpoint cannot be loaded, or cannot be loaded safely.
        InputError: the export does not fit into the memory; the number of labels, means or standard deviations does not
        fit the model; a label is not valid; or the images of ``calibration`` do not fit the model.
        FoldError: the model does not meet the requirements of a folding pass, or the pass did not fold the model
        completely.
        ExportError: the exporter fails, a check of the graph fails, or no runtime on this machine gives PyTorch's
        logits.
        OutputError: ``out`` exists and ``force`` is not set, ``out`` holds the checkpoint or is no earlier output, or
        writing fails.
    """
    checkpoint, out = Path(checkpoint), Path(out)
    precisions = precisions_from(precisions) if precisions else ()
    require_free(out, force=force)
    if out.resolve() in checkpoint.resolve().parents:
        raise OutputError(f"{out} holds the checkpoint {checkpoint}", hint="type -o with another path")

    def begin(number: int) -> None:
        on_progress(Progress(_STEPS[number], number, len(_STEPS)))

    begin(0)
    _require_memory(checkpoint, hints.weights if hints else None)
    loaded = load_checkpoint(checkpoint, hints)
    trainable_parameters = loaded.trainable_parameters  # before the model is folded in place
    release_memory()
    typed, family, refusals = options, family_of(loaded.spec), Refusals()
    loaded.model.outputs, loaded.model.normalises = options.outputs, options.normalise
    with refusals.collected():
        options = options.completed(loaded.images, default=family.default_resize)
        image = options.image_spec(loaded.spec)
        if calibration is not None:
            require_images(calibration, image, options.input_kind)
    with refusals.collected():
        require_outputs(loaded)
        labels = _fitting_labels(options, loaded.spec) if options.has_logits else ()
        label_set = LabelSet(labels=labels, task=options.agreed_task, thresholds=options.fitting_thresholds(labels))
    refusals.raise_all()
    origins = options.origins(loaded.images, typed, family=family.name if family.default_resize else "")
    with new_folder(out, force=force) as folder:
        begin(1)
        golden, noises = golden_from_model(loaded.model, options.input_kind, image)
        (folder / artifacts.GOLDEN_FILE).write_bytes(bytes_from_golden(golden))
        (folder / artifacts.LABELS_FILE).write_text("".join(f"{label}\n" for label in labels), encoding="utf-8")
        (folder / artifacts.WEIGHTS_FILE).write_bytes(bytes_from_model(loaded.model))
        begin(2)
        folded = fold(loaded.model, in_place=True)
        unproven = Manifest(
            spec=loaded.spec,
            trainable_parameters=trainable_parameters,
            checkpoint={
                "name": loaded.file.path.name,
                "sha256": loaded.file.sha256,
                "wrapping": loaded.file.wrapping,
            },
            unused_keys=loaded.unused,
            taken_from=loaded.taken_from | origins,
            input_kind=options.input_kind,
            max_batch=options.max_batch,
            image=image,
            task=label_set.task,
            thresholds=label_set.thresholds,
            outputs=_output_records(golden, loaded.model),
            labels=labels,
            opset=OPSET,
            folding=tuple(name for name, changed in folded.passes.items() if changed),
            masks=(),
            biases=(),
            export_parity={},
            export_skipped={},
            float32_noise=noises[0].largest,
            features_noise=noises[1].largest if len(noises) > 1 else 0.0,
            versions=artifacts.tool_versions(*family_of(loaded.spec).distributions),
            files={},
        )
        begin(3)
        inside = image if options.input_kind == "pixels" else None
        texts = folded.model.text_embeddings()
        weight = None if texts is None else texts.numpy()
        earlier = None if weight is None else bundle_of_same_tower(out, unproven)
        if weight is None or earlier is None:
            graph = onnx_from_model(folded.model, preprocessing=inside, max_batch=options.max_batch)
        else:
            graph = with_other_classes(earlier.onnx_path, weight)
            unproven.taken_from["graphs"] = f"the earlier bundle {earlier.sha256[:12]}…, with these classes"
        masks, biases = prove_folded(graph.graph, folded.masks, folded.biases, foreign=folded.model.foreign)
        if weight is not None:
            prove_classes(graph.graph, weight, labels)
        notes = {"gmmvit.checkpoint_sha256": loaded.file.sha256}
        notes |= {f"gmmvit.mask_sha256.{mask.layer}": mask.constant_sha256 for mask in masks}
        graph.metadata_props.update(notes)
        write_graph(graph, folder / artifacts.MODEL_FILE)
        _free_weights(folded.model, graph.graph)
        unproven = replace(
            unproven,
            masks=masks,
            biases=biases,
            files={file.name: sha256_of_file(file) for file in sorted(folder.iterdir())},
        )
        del graph
        release_memory()
        begin(4)
        parity, proven = _proven(Bundle(path=folder, manifest=unproven), loaded, noises)
        manifest = replace(
            unproven, export_parity=parity, export_skipped=proven.skipped | proven.wrong, wrong_runners=(*proven.wrong,)
        )
        bundle = Bundle(path=folder, manifest=manifest)
        text = json.dumps(bundle.manifest.to_json(), indent=1, ensure_ascii=False)
        (folder / artifacts.MANIFEST_FILE).write_text(text + "\n", encoding="utf-8")
        variants_from_bundle(bundle, precisions, calibration, calibration_images, on_progress=on_progress)
        if weight is not None and earlier is not None:
            variants_of_same_tower(bundle, earlier, weight, besides=precisions, on_progress=on_progress)
    return replace(bundle, path=out)


def _require_memory(checkpoint: Path, weights: str | None) -> None:
    """Errors: InputError for an export that does not fit into the memory: the kernel would end it in the middle."""
    size, available = weights_bytes(checkpoint, weights), available_bytes()
    needed = _GIB // 2 + 4 * size  # measured: four copies of the weights, and what every export takes
    if available is not None and available < needed:
        raise InputError(
            f"{checkpoint}: an export of {size / _GIB:.2f} GiB of weights takes about {needed / _GIB:.1f} GiB of "
            f"memory, and {available / _GIB:.1f} GiB are available",
            hint="end other programs, raise the memory limit of the container, or export on a machine with more "
            "memory; the bundle can be copied",
        )


@torch.no_grad()
def require_outputs(loaded: LoadedCheckpoint) -> None:
    """Check that the model computes its outputs for an image.

    Errors: InputError when the network does not have the features, has two classifier heads, or when the features of an
    image are not a vector.
    """
    model, spec = loaded.model, loaded.spec
    if "logits" in model.outputs and not spec.classes:
        raise InputError(
            f"{loaded.file.path}: the network has no classifier, so that it has no logits",
            hint="add --outputs features",
        )
    if model.outputs == ("logits",):
        return
    heads = [name for name, _ in model.classifier_heads()]
    if len(heads) > 1:
        raise InputError(
            f"{loaded.file.path}: --outputs {','.join(model.outputs)}: the network is distilled: {' and '.join(heads)} "
            "read different tokens, so that no single vector is the features",
            hint="leave --outputs out to export the logits",
        )
    why = ""
    try:
        for name, answer in zip(model.outputs, model.answers(torch.zeros(1, *input_shape(spec))), strict=True):
            if answer.ndim != 2:
                why = f"the {name} of an image have the shape {tuple(answer.shape[1:])}, not that of a vector"
    # The network can be code of another package, which raises exceptions of any class.
    except Exception as exc:
        why = str(exc).strip() or type(exc).__name__
    if why:
        raise InputError(
            f"{loaded.file.path}: --outputs {','.join(model.outputs)}: {why}",
            hint="leave --outputs out to export the logits; for a model of timm, type --model-args with the "
            "global_pool of a classifier, such as token or avg",
        )


def _fitting_labels(options: ExportOptions, spec: ModelSpec) -> tuple[str, ...]:
    """Return the labels; the class indices if nobody states labels.  Errors: InputError when they do not fit."""
    labels = options.labels
    if spec.classes == 1 and options.agreed_task == "single-label":
        raise InputError(
            "the network has one output, and with --task single its softmax is 1 for every image",
            hint="add --task multi --thresholds 0.5 --labels NAME: the probability from which on an image has the "
            "label, and its name",
        )
    if labels is None:
        return tuple(str(index) for index in range(spec.classes))
    if len(labels) != spec.classes:
        raise InputError(
            f"{options.labels_source}: expected {spec.classes} labels, one for each class of the model, got "
            f"{len(labels)}",
            hint="type --labels with the label of each class, in the order of the index",
        )
    return tuple(clean_name(label, options.labels_source) for label in labels)


def _output_records(golden: GoldenSet, model: Model) -> tuple[OutputRecord, ...]:
    """Return the outputs of a bundle, whose widths the golden answers show."""
    of_features: Mapping[str, Any] = {"pooling": model.pooling, "unit_length": model.normalises}
    widths = {golden.output: golden.logits.shape[1]}
    if golden.features is not None:
        widths["features"] = golden.features.shape[1]
    return tuple(
        OutputRecord(name=name, shape=(width,), meaning=MEANINGS[name], **(of_features if name == "features" else {}))
        for name, width in widths.items()
    )


def _free_weights(model: Model, graph: ir.Graph) -> None:
    """Free the memory of a network that can no longer be used: the rewrite rules of onnxscript keep the last graph."""
    for parameter in model.parameters():
        parameter.data = parameter.data.new_empty(0)
    for value in graph.initializers.values():
        value.const_value = None


def _proven(bundle: Bundle, loaded: LoadedCheckpoint, noises: tuple[Noise, ...]) -> tuple[dict[str, float], Proven]:
    """Run ``model.onnx`` in every runner, and compare the outputs with the golden outputs, which are PyTorch's.

    Returns (``export_parity`` of the manifest, the runners).
    Errors: ExportError when no runner gives the golden outputs without our kernels, which replace parts of the graph.
    """
    inputs, expected = bundle.golden_rows()
    limits = {name: limit_from_stored(noise).largest for name, noise in zip(expected, noises, strict=True)}
    variant, what = open_variant(bundle, "fp32"), str(loaded.file.path)
    release_memory()  # that of the graph, which was read to check it
    proven = proven_programs(proof_programs(bundle, variant), inputs, expected, limits)
    differences = proven.differences
    if all(name.endswith(KERNELS_SUFFIX) for name in differences):
        reasons = [f"runner {name}: {why}" for name, why in proven.wrong.items()] or list(proven.skipped.values())
        raise ExportError(f"{what}: no runtime on this machine gives PyTorch's outputs: {'; '.join(reasons)}")
    first = next(iter(expected))
    if loaded.model.foreign:
        # Runtimes divide a large batch into chunks, so that more rows than these would run no other batch.
        max_batch = min(bundle.manifest.max_batch, len(inputs))
        with proof_programs(bundle, variant)[next(iter(differences))]() as runner:
            require_batches(runner.run, inputs, expected[first], limits[first], max_batch=max_batch)
    parity: dict[str, float] = {}
    for output in expected:
        prefix = "" if output == first else f"{output}_"
        parity |= {f"{name}_{prefix}largest_abs": largest[output] for name, largest in differences.items()}
        parity[f"{prefix}limit"] = limits[output]
        parity[f"{prefix}spread"] = float(np.ptp(expected[output], axis=0).max())
    return parity, proven
