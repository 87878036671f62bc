from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import typer

from gmmvit_cli.commands import collect_garbage_rarely
from gmmvit_cli.convert import print_variants
from gmmvit_cli.models import hints_from, options_of_checkpoints
from gmmvit_cli.options import (
    AS_JSON,
    CALIBRATION,
    CALIBRATION_IMAGES,
    FORCE,
    Normalisation,
    labels_from,
    normalisation_from,
    of_fields,
    require_calibration,
    thresholds_from,
)
from gmmvit_cli.output import note, print_json, print_table
from gmmvit_cli.panels import INPUT, OUTPUT, PRECISION, completion, listed, output_option, refusals_of
from gmmvit_cli.progress import progress
from gmmvit_deploy.checkpoints.reading import require_checkpoint
from gmmvit_deploy.counts import counted
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.images.datasets import DATASETS
from gmmvit_deploy.images.resize_rules import RESIZE_RULES, ResizeRule
from gmmvit_deploy.inference.precision import PRECISIONS, Precision
from gmmvit_deploy.models.families import FAMILIES
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.precision_names import precisions_from

if TYPE_CHECKING:
    from gmmvit_deploy.bundle.artifacts import Bundle
    from gmmvit_deploy.inference.labels import Task
    from gmmvit_deploy.models.specs import OutputName

COLLECTS = True
SHARED = (options_of_checkpoints,)
EXAMPLE = """# a file of your own training; for your own class, add --model FILE.py:CLASS
gmmvit export checkpoint.pth -o bundle --dataset cifar10
# timm: a checkpoint of train.py or a model folder; a state dict needs --model
gmmvit export model_best.pth.tar -o bundle --labels labels.txt
# Hugging Face: what 'hf download OWNER/NAME --local-dir FOLDER' writes
gmmvit export FOLDER -o bundle"""

_InputKind = Literal["pixels", "tensor"]
_TASKS: dict[str, Task] = {"single": "single-label", "multi": "multi-label"}
_OUTPUTS: dict[str, tuple[OutputName, ...]] = {
    "logits": ("logits",),
    "features": ("features",),
    "both": ("logits", "features"),
}
_STRETCHED = tuple(family.name for family in FAMILIES if family.default_resize == "stretch-bilinear")
_LARGEST = "_largest_abs"  # of each proven runner in a manifest's export_parity


def export(
    context: typer.Context,
    checkpoint: Path = INPUT.argument(
        "CHECKPOINT",
        "A PyTorch checkpoint, a safetensors file, or a model folder of timm or Hugging Face transformers.",
    ),
    dataset: str | None = INPUT.option(
        "NAME",
        f"Use the mean, standard deviation and labels of a data set: {listed(tuple(DATASETS))}.",
        names=tuple(DATASETS),
    ),
    mean: str | None = INPUT.option(
        "NUMBERS",
        "Mean of each channel in training, with pixels scaled to 0..1, such as 0.49,0.48,0.45; 0.5 is that of all.",
    ),
    std: str | None = INPUT.option(
        "NUMBERS", "Standard deviation of each channel in training, with pixels scaled to 0..1."
    ),
    labels: str | None = INPUT.option(
        "FILE|LIST",
        "Class labels: a text file with a label, or an index and a label, on each line; a JSON file; or labels "
        "separated by commas; in the order of the class index, for ImageFolder of torchvision the sorted names of the "
        "folders. Without this option: what the checkpoint or --dataset states, else the class indices.",
    ),
    prompts: list[str] | None = INPUT.option(
        "TEXT",
        "For CLIP and SigLIP of Hugging Face: make the classes of the labels, each in place of {} in TEXT, such as 'a "
        "photo of a {}'. The text tower runs once, at export. May be repeated: several prompts are averaged.",
        name="--prompt",
    ),
    resize: ResizeRule | None = INPUT.option(
        "METHOD",
        "How images were resized when the model was evaluated: stretch, center, shortest, squash or border, followed "
        "by -bilinear or -bicubic. stretch does not keep the aspect ratio and does not crop; center, squash and border "
        "are timm's crop modes. Without this option: what the checkpoint states; otherwise stretch-bilinear for the "
        f"families {listed(_STRETCHED)}. Required for other checkpoints that do not state it, but with --input tensor.",
        names=RESIZE_RULES,
    ),
    crop_pct: float | None = INPUT.option(
        "NUMBER",
        "timm's crop_pct, for center, squash and border: images are resized to the model's image size divided by "
        "NUMBER, and the centre is cropped. Above 0 and at most 1. Without this option: what the checkpoint states, "
        "else 1.",
    ),
    task: str | None = INPUT.option(
        "TASK",
        "single: an image has one class. multi: an image has any number of classes, by sigmoid and thresholds. "
        "Without this option: single; required if the checkpoint states that an image can have several labels.",
        names=tuple(_TASKS),
    ),
    thresholds: str | None = INPUT.option(
        "FILE|NUMBER",
        "With --task multi: the probability from which on an image has a label. A file with a number on each line "
        "in the order of the labels, a .json file with a list or with label: number, or a number for all labels.",
    ),
    input_kind: _InputKind = INPUT.option(
        "KIND",
        "Input of the graph. pixels: uint8, which the graph normalises. tensor: float32, already normalised.",
        default="pixels",
        name="--input",
        names=get_args(_InputKind),
    ),
    out: Path = output_option("BUNDLE", "Folder to write the bundle to."),
    force: bool = FORCE,
    max_batch: int = OUTPUT.option("N", "Largest batch size that the graph accepts.", default=64),
    outputs: str = OUTPUT.option(
        "NAMES",
        "Outputs of the graph: logits, features or both. features: the pooled values before the classifier head, "
        "also of a backbone without a head.",
        default="logits",
        names=tuple(_OUTPUTS),
    ),
    normalise: bool = OUTPUT.flag("--normalise", "Give the features unit length, for comparisons by cosine."),
    precisions: Sequence[Precision] = PRECISION.option(
        "LIST",
        f"Precisions to write, separated by commas: {listed(PRECISIONS)}. fp32 is always written.",
        default="fp32",
        name="--precision",
        autocompletion=completion(PRECISIONS, several=True),
        parser=precisions_from,
    ),
    calibration: str | None = CALIBRATION,
    calibration_images: int = CALIBRATION_IMAGES,
    as_json: bool = AS_JSON,
) -> None:
    """The result is a bundle: the folder that most other commands read. The bundle holds the ONNX graph, the weights,
    and recorded inputs with PyTorch's logits for comparison. What is the same for every image, such as a mask on the
    attention scores, is stored in the graph as a constant. If a step fails, no files are left behind.
    """
    from gmmvit_deploy.exporting.options import ExportOptions, refuse_unstated

    refusals, hints, normalisation, names = refusals_of(context), LoadHints(), Normalisation(), None
    with refusals.collected():
        require_checkpoint(checkpoint)
    with refusals.collected():
        normalisation = normalisation_from(dataset, mean, std)
    with refusals.collected():
        names = normalisation.labels if labels is None else labels_from(labels)
        if outputs == "features" and labels is not None:
            raise InputError(
                "--labels names the classes of the logits, and --outputs features writes no logits",
                hint="leave --labels out, or type --outputs both",
            )
    with refusals.collected():
        hints = hints_from(
            context.params,
            only_features=outputs == "features",
            only_tensors=input_kind == "tensor",
            labels=names or () if prompts else (),
            prompts=tuple(prompts or ()),
        )
    with refusals.collected():
        read = {
            "mean": normalisation.mean,
            "std": normalisation.std,
            "labels": names,
            "labels_source": f"--labels {labels}" if labels else f"--dataset {dataset}",
            "outputs": _OUTPUTS[outputs],
            "task": None if task is None else _TASKS[task],
            "thresholds": None if thresholds is None else thresholds_from(thresholds),
            "thresholds_source": thresholds or "--thresholds",
        }
        options = ExportOptions(**{**of_fields(ExportOptions, context.params), **read})
        refuse_unstated(checkpoint, hints, options, refusals)
    with refusals.collected():
        require_calibration(precisions, calibration)
    refusals.raise_all()
    collect_garbage_rarely()
    with progress("export") as on_progress:
        from gmmvit_deploy.bundle.variants import forms_in, open_variant
        from gmmvit_deploy.exporting.bundle_from_checkpoint import bundle_from_checkpoint
        from gmmvit_deploy.exporting.fastest import record_fastest

        bundle = bundle_from_checkpoint(
            checkpoint,
            out,
            options,
            hints=hints,
            precisions=precisions,
            calibration=calibration,
            calibration_images=calibration_images,
            force=force,
            on_progress=on_progress,
        )
        fastest = record_fastest(bundle, on_progress=on_progress)
        variants = [open_variant(bundle, name, form) for name in PRECISIONS for form in forms_in(bundle, name)]
    manifest = bundle.manifest
    if as_json:
        records = {variant.path.stem: variant.record.to_json() for variant in variants if variant.record}
        print_json(
            {
                "bundle": str(out),
                "sha256": bundle.sha256,
                "manifest": manifest.to_json(),
                "precisions": records,
                "skipped": _not_proven(bundle),
                "runner": str(fastest.passed[0].runner) if fastest is not None else None,
            }
        )
        return
    shape = ", ".join(map(str, bundle.input_shape))
    rows = [
        *([("weights", manifest.checkpoint["wrapping"])] if hints.weights else []),
        ("model", manifest.spec.title),
        ("input", f"{manifest.input_kind}: {bundle.input_dtype} (1..{manifest.max_batch}, {shape})"),
        *(("output", f"{o.name}: float32 (1..{manifest.max_batch}, {o.shape[0]}){o.words}") for o in manifest.outputs),
        *_folded(bundle),
        *_preprocessing(bundle),
        *_origins(bundle),
        *_resized(bundle),
        *_proven(bundle),
        ("SHA-256", bundle.sha256),
    ]
    print_table(("", ""), rows)
    if any(variant.record for variant in variants):
        print_variants(variants)
    if "graphs" in manifest.taken_from:
        note(
            "the graphs are the earlier ones with these classes; what was judged on other classes is left out: type "
            f"gmmvit optimize {out} --data DATA to choose a runner, or gmmvit parity {out} --data DATA to judge one"
        )
    typer.echo(out)


def _folded(bundle: Bundle) -> list[tuple[str, str]]:
    manifest = bundle.manifest
    constants = [
        counted(len(each), noun) for each, noun in ((manifest.masks, "mask"), (manifest.biases, "bias")) if each
    ]
    stored = f"{' and '.join(constants)} stored as constants" if constants else ""
    passes = ", ".join(manifest.folding)
    return [("folded", f"{stored} ({passes})" if stored and passes else stored or passes)] if stored or passes else []


def _preprocessing(bundle: Bundle) -> list[tuple[str, str]]:
    image, labels = bundle.manifest.image, bundle.manifest.labels
    rows = []
    if bundle.manifest.input_kind == "pixels" and image.mean is not None and image.std is not None:
        crop = f", crop_pct {image.crop_pct:g}" if image.crop_pct != 1 else ""
        mean, std = (", ".join(f"{value:.4g}" for value in values) for values in (image.mean, image.std))
        rows = [("images", f"resize {image.resize}{crop}; mean {mean}; std {std}")]
    shown = ", ".join(labels[:5]) + (", …" if len(labels) > 5 else "")
    task = " (multi-label)" if bundle.manifest.task == "multi-label" else ""
    return [*rows, ("labels", f"{len(labels)}{task}: {shown}")] if labels else rows


def _origins(bundle: Bundle) -> list[tuple[str, str]]:
    """Return where the values come from that neither a tensor shows nor the user typed, one row for each source."""
    names: dict[str, list[str]] = {}
    for name, origin in bundle.manifest.taken_from.items():
        if not origin.startswith("--"):
            names.setdefault(origin, []).append(name)
    return [("origin", f"{', '.join(values)}: {origin}") for origin, values in names.items()]


def _resized(bundle: Bundle) -> list[tuple[str, str]]:
    resizing = bundle.manifest.spec.resizing
    if not resizing:
        return []
    how = resizing.removeprefix("resized ")
    return [("resized", f"{how}; to check the accuracy at this size, add --data to gmmvit parity")]


def _proven(bundle: Bundle) -> list[tuple[str, str]]:
    parity = bundle.manifest.export_parity
    rows = []
    for key, largest in parity.items():
        name, is_program, _ = key.partition(_LARGEST)
        prefix = "features_" if name.endswith("_features") else ""
        if is_program:
            who = f"features of {name.removesuffix('_features')} differ" if prefix else f"{name} differs"
            limit = parity[f"{prefix}limit"]
            rows.append(("checked", f"{who} from PyTorch by at most {largest:.1e} (limit {limit:.1e})"))
    if parity["spread"] <= parity["limit"]:
        why = (
            "PyTorch's outputs are equal for all inputs, so that the comparison proves nothing: a wrong program gives "
            "the same outputs; the weights of a classifier head are often zero before training"
        )
        rows.append(("WARNING", why))
    return [*rows, *(("skipped", reason) for reason in _not_proven(bundle))]


def _not_proven(bundle: Bundle) -> list[str]:
    skipped = bundle.manifest.export_skipped
    return [reason if name in reason else f"{name}: {reason}" for name, reason in skipped.items()]
