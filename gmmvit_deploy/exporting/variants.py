"""Write a bundle's network in another precision, as ``graphs/<precision>.onnx`` with a record of the checks.

The graphs come from `graphs_of_precisions`, and each is checked: with every rounding, and in every runtime that
supports its precision. If a step fails, no file is written or replaced.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gmmvit_deploy.bundle.artifacts import Bundle, open_bundle, tool_versions
from gmmvit_deploy.bundle.variants import (
    GRAPHS,
    Variant,
    VariantRecord,
    forms_in,
    graph_file,
    open_variant,
    record_file,
)
from gmmvit_deploy.errors import BundleError, ExportError, OutputError
from gmmvit_deploy.exporting._numeric_proof import proven_programs
from gmmvit_deploy.exporting._recipes import recipe_from, without_judgement
from gmmvit_deploy.exporting.golden import RANDOM, fresh_inputs
from gmmvit_deploy.exporting.graphs_of_precisions import PreparedGraph, prepared_graph
from gmmvit_deploy.exporting.other_classes import with_other_classes
from gmmvit_deploy.files.leftovers import temporary_folder
from gmmvit_deploy.files.writing import new_file, require_free_file, sha256_of_file
from gmmvit_deploy.graphs.masks import changes_of
from gmmvit_deploy.graphs.weights import files_of, write_graph
from gmmvit_deploy.inference.cores import int8_saturates
from gmmvit_deploy.inference.precision import CALIBRATED, PRECISIONS, QUANTIZED, SPECS, Precision, graph_precision
from gmmvit_deploy.inference.runner_name import with_form
from gmmvit_deploy.precision_names import precision_from, precisions_from
from gmmvit_deploy.progress import OnProgress, Progress, ignore
from gmmvit_deploy.runtimes.programs.emulated_precision import emulated_outputs
from gmmvit_deploy.runtimes.programs.image_batches import open_images
from gmmvit_deploy.runtimes.runners.open import proof_programs
from gmmvit_deploy.runtimes.runners.speed import measured_speed
from gmmvit_deploy.tolerances import limit_from_stored

if TYPE_CHECKING:
    import onnx_ir as ir
    from numpy.typing import NDArray

    from gmmvit_deploy.bundle.gates import Gate
    from gmmvit_deploy.exporting._recipes import Recipe
    from gmmvit_deploy.inference.precision import Form
    from gmmvit_deploy.runtimes.programs.image_batches import ImageBatches

__all__ = ["CALIBRATION_IMAGES", "variant_from_bundle", "variants_from_bundle", "variants_of_same_tower"]

CALIBRATION_IMAGES = 512
"""The maximum number of calibration images, if the user states no other number."""


def variant_from_bundle(
    bundle: Bundle | Path | str,
    precision: Precision,
    *,
    calibration: ImageBatches | str | None = None,
    padded: bool = True,
    force: bool = False,
) -> Variant:
    """Write the graphs of a bundle in a precision, as `variants_from_bundle`, and return the one that CPUs run.

    Example: ``variant_from_bundle("bundle", "int8", calibration="folder:train")``.

    calibration: real images, as a text such as ``folder:train`` or opened (`open_images`); required for fp8, and not
    allowed for fp16 and bf16.
    Errors: as in `variants_from_bundle`.
    """
    bundle, precision = open_bundle(bundle), precision_from(precision)
    if isinstance(calibration, str):
        calibration = open_images(bundle, calibration, limit=CALIBRATION_IMAGES)
    form = _form(precision, calibrated=calibration is not None, gate=None)
    _require_free(bundle, precision, form, force=force)
    return _written(bundle, precision, form, calibration=calibration, padded=padded, force=force)[0]


def variants_from_bundle(
    bundle: Bundle | Path | str,
    precisions: str | Sequence[Precision],
    calibration: str | None = None,
    calibration_images: int = CALIBRATION_IMAGES,
    *,
    padded: bool = True,
    gate: Gate | None = None,
    like: VariantRecord | None = None,
    merged: bool = False,
    for_gpus: bool = True,
    timed: bool = True,
    force: bool = False,
    on_progress: OnProgress = ignore,
) -> list[Variant]:
    """Write the graphs of a bundle in several precisions, each with its record.

    For fp32, nothing is written: ``model.onnx`` is the graph. For int8, a graph for CPUs is written.

    calibration: the source of the images that calibrate int8 and fp8, as in `open_images`. Without it, int8 has the
    dynamic form, and fp8 cannot be written.
    padded: if engines do not fuse attention with the model's head dim, pad the heads with zeros to a larger head dim.
    gate: what the int8 graph for CPUs must reach: projections move to more exact forms until it does, which gives the
    mixed form. In the graph for GPUs, these are not quantised; its record says whether the gate holds there.
    like: the record of a calibrated int8 graph, whose recipe is taken, with no projection in a more exact form; None
    tries several recipes. Not with ``gate``.
    merged: write only the merged form of int8, of the recipe ``like``.
    for_gpus: with calibration images, also write the int8 graph for GPUs, if the bundle has none.
    timed: time each graph and float32 in turn, for its record.
    force: replace existing graphs and records.
    Errors:
        InputError: calibration images are missing, or are given for a precision that does not use calibration; or this
        process cannot build the model, because the code of the model is in a file that the user did not name.
        FoldError: the model does not meet the requirements of a folding pass, or the pass did not fold the model
        completely.
        ExportError: an operator has no known role; a check of the graph fails; a logit of the graph is not finite; or
        no runtime gives the golden logits (PyTorch's logits, recorded at export) within the limit.
        OutputError: a graph exists and ``force`` is not set, before any work if its name is known then; or writing
        fails.
    Each leaves the graphs of its precision unchanged. If the process is killed while files are replaced, a record and a
    graph may not match, which `open_variant` reports.
    Returns the graphs that were written, in the order of the precisions, of int8 the one for CPUs first.
    """
    bundle, precisions = open_bundle(bundle), precisions_from(precisions) if precisions else ()

    def form_of(precision: Precision) -> Form:
        calibrated = calibration is not None and precision in CALIBRATED
        return "merged" if merged else _form(precision, calibrated=calibrated, gate=gate)

    for precision in precisions:
        _require_free(bundle, precision, form_of(precision), force=force)
    variants: list[Variant] = []
    for number, precision in enumerate(precisions):
        on_progress(Progress(f"write {precision}", number, len(precisions)))
        images = (
            open_images(bundle, calibration, limit=calibration_images)
            if calibration and precision in CALIBRATED
            else None
        )
        variants += _written(
            bundle,
            precision,
            form_of(precision),
            calibration=images,
            padded=padded,
            gate=gate if "mixed" in SPECS[precision].forms else None,
            recipe=None if like is None else _static_recipe(like),
            for_gpus=for_gpus,
            timed=timed,
            force=force,
            on_progress=on_progress,
        )
    return variants


def variants_of_same_tower(
    bundle: Bundle,
    earlier: Bundle,
    weight: NDArray[Any],
    *,
    besides: Sequence[Precision],
    on_progress: OnProgress = ignore,
) -> None:
    """Write the graphs in other precisions of an earlier bundle (`bundle_of_same_tower`), with other classes.

    What depends on the image tower is kept: the int8 weights, the ranges, and the recipe that chose them. What depends
    on the classes is measured again, or left out of the record if images judged it. Graphs are left out that were
    changed, or that other versions made, and int8 in the mixed form: answers chose which projections move.
    weight: (C, D), the text embeddings of the classes of ``bundle``.  besides: the precisions to leave out.
    Errors: ExportError and OutputError as in `variants_from_bundle`.
    """
    others = [name for name in PRECISIONS[1:] if name not in besides]
    held = [(name, form) for name in others for form in forms_in(earlier, name) if form != "mixed"]
    for number, (precision, form) in enumerate(held):
        on_progress(Progress(f"exchange the classes of {with_form(precision, form)}", number, len(held)))
        try:
            variant = open_variant(earlier, precision, form)
        except BundleError:
            continue
        if variant.record is None or variant.record.versions != tool_versions("openvino"):
            continue
        draft = replace(
            variant.record, bundle_sha256=bundle.sha256, calibration=without_judgement(variant.record.calibration)
        )
        model = with_other_classes(variant.path, weight)
        model.metadata_props["gmmvit.bundle_sha256"] = bundle.sha256
        with temporary_folder("convert") as folder:
            _put(bundle, [_recorded(bundle, draft, model, folder, on_progress)], folder, force=False)


def _form(precision: Precision, *, calibrated: bool, gate: Gate | None) -> Form:
    """Return the form of the graph for CPUs; with a gate, the form is static if no projection has to move."""
    if not SPECS[precision].forms:
        return ""
    if not calibrated:
        return "dynamic"
    return "static" if gate is None else "mixed"


def _require_free(bundle: Bundle, precision: Precision, form: Form, *, force: bool) -> None:
    """Check that a graph does not exist, before the work: calibration can take minutes.  Errors: OutputError."""
    path = bundle.path / graph_file(precision, form)
    if precision != "fp32" and path.parent.is_dir():
        require_free_file(path, force=force, fixed_name=True)


def _static_recipe(record: VariantRecord) -> Recipe | None:
    recipe = recipe_from(record.calibration)
    return None if recipe is None else replace(recipe, float32=())


def _text(record: VariantRecord) -> bytes:
    return (json.dumps(record.to_json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _written(
    bundle: Bundle,
    precision: Precision,
    form: Form,
    *,
    calibration: ImageBatches | None,
    padded: bool,
    force: bool,
    gate: Gate | None = None,
    recipe: Recipe | None = None,
    for_gpus: bool = True,
    timed: bool = True,
    on_progress: OnProgress = ignore,
) -> list[Variant]:
    if precision == "fp32":
        return [open_variant(bundle, precision)]
    prepare = partial(
        prepared_graph,
        bundle,
        precision,
        calibration=calibration,
        padded=padded,
        gate=gate,
        on_progress=on_progress,
    )
    with temporary_folder("convert") as folder:
        prepared = prepare(for_cpu=bool(form), merged=form == "merged", recipe=recipe)
        if form == "mixed" and not (prepared.calibration or {}).get("moved"):
            form = "static"
            path = bundle.path / graph_file(precision, form)
            if path.exists() and not force:
                raise OutputError(
                    f"{path} exists, and no projection has to leave the static form for the gate to hold",
                    hint="to replace the graph by one with the recipe that the gate judged, add --force",
                )
        draft = _draft(bundle, precision, form, prepared)
        records = [_recorded(bundle, draft, prepared.model, folder, on_progress, timed=timed)]
        of_gpus_too = for_gpus and form not in ("", "merged") and calibration is not None
        if of_gpus_too and (force or not (bundle.path / graph_file(precision)).exists()):
            del prepared  # each holds the weights
            of_gpus = prepare(recipe=recipe_from(records[0].calibration))
            draft = _draft(bundle, precision, "", of_gpus)
            records.append(_recorded(bundle, draft, of_gpus.model, folder, on_progress, timed=timed))
        _put(bundle, records, folder, force=force)
    return [open_variant(bundle, precision, record.form) for record in records]


def _put(bundle: Bundle, records: Sequence[VariantRecord], folder: Path, *, force: bool) -> None:
    """Write graphs, whose files are in ``folder``, and their records into the bundle."""
    content: dict[Path, Path | bytes] = {}
    for record in records:
        graph = Path(graph_file(record.precision, record.form))
        content |= {graph.parent / file.name: file for file in files_of(folder / graph.name) if file.is_file()}
        content[Path(record_file(record.precision, record.form))] = _text(record)
    try:
        (bundle.path / GRAPHS).mkdir(exist_ok=True)
    except OSError as exc:
        raise OutputError(f"{bundle.path / GRAPHS}: cannot be written: {exc.strerror}") from exc
    with ExitStack() as closing:
        files = []
        for name, source in content.items():
            # A record without a graph is left by a killed process.
            may_replace = force or name.suffix == ".json"
            file = closing.enter_context(new_file(bundle.path / name, force=may_replace))
            file.write(source if isinstance(source, bytes) else source.read_bytes())
            files.append(file)
        for file in files:  # a full disk is met here, before the first file is replaced
            file.flush()
            os.fsync(file.fileno())


def _draft(bundle: Bundle, precision: Precision, form: Form, prepared: PreparedGraph) -> VariantRecord:
    """Return the record of a graph that is neither written nor measured."""
    return VariantRecord(
        precision=precision,
        form=form,
        bundle_sha256=bundle.sha256,
        onnx_sha256="",
        passes={name: len(changed) for name, changed in prepared.folded.passes.items() if changed},
        constants=prepared.constants,
        mask_sha256=prepared.mask_sha256,
        masks=tuple(changes_of(prepared.folded.masks, "fp32" if form else precision)),
        calibration=prepared.calibration,
        golden={},
        versions=tool_versions("openvino"),
    )


def _recorded(
    bundle: Bundle,
    draft: VariantRecord,
    model: ir.Model,
    folder: Path,
    on_progress: OnProgress,
    *,
    timed: bool = True,
) -> VariantRecord:
    """Write a graph to ``folder`` and measure it.  Returns the graph's record, completed."""
    precision, form = draft.precision, draft.form
    path = folder / Path(graph_file(precision, form)).name
    write_graph(model, path)
    hashes = [sha256_of_file(file) for file in files_of(path)]
    record = replace(
        draft,
        onnx_sha256=hashes[0],
        data_sha256="".join(hashes[1:]),
        golden=_measured(bundle, model, precision, path.name),
    )
    variant = Variant(precision=precision, path=path, sha256=hashes[0], record=record)
    record = replace(record, programs=_proven(bundle, variant, record.golden["largest_abs"]))
    of_gpus = SPECS[precision].forms and not form
    # A record has a speed if it is that of the image tower, which other classes do not change.
    if of_gpus or record.speed or not timed:
        return record
    on_progress(Progress(f"time {precision} and fp32 in turn"))
    return replace(record, speed=measured_speed(bundle, replace(variant, record=record)))


def _proven(bundle: Bundle, variant: Variant, recorded: float) -> dict[str, dict[str, Any]]:
    """Run the graph in every runner on CPUs that supports the precision, and compare the logits with the golden logits.

    recorded: the largest absolute difference that `_measured` computed with every rounding of the graph.
    Returns ``programs`` of the record.
    Errors: ExportError when runners of this machine cannot run the graph or exceed the precision's limit, and no other
    gives the golden logits. They do not show that the graph is wrong in bf16, where OpenVINO runs ``model.onnx`` and
    chooses where to round, and in int8 on a CPU where OpenVINO's products saturate.
    """
    inputs, outputs = bundle.golden_rows()
    first, expected = next(iter(outputs.items()))
    limit = limit_from_stored(bundle.stored_noise(expected), variant.precision, recorded=recorded).largest
    proven = proven_programs(proof_programs(bundle, variant), inputs, {first: expected}, {first: limit})
    saturates = int8_saturates() if SPECS[variant.precision].projection == "int8" and variant.form != "dynamic" else ""
    of_the_file = graph_precision(variant.precision) == variant.precision and not saturates
    if proven.wrong and not proven.differences and of_the_file:
        reasons = "; ".join(f"runner {name}:{variant.precision}: {why}" for name, why in proven.wrong.items())
        raise ExportError(f"{variant.path.name}: no runtime on this machine gives the graph's logits: {reasons}")

    def entry(why: str, **more: Any) -> dict[str, Any]:
        return {"skipped": why.replace(f"{variant.path.parent}/", ""), **more}

    return {
        **{name: {"largest_abs": largest[first], "limit": limit} for name, largest in proven.differences.items()},
        **{name: entry(why) for name, why in proven.skipped.items()},
        **{name: entry(f"{why}; {saturates}".removesuffix("; "), wrong=True) for name, why in proven.wrong.items()},
    }


def _measured(bundle: Bundle, model: ir.Model, precision: Precision, file: str) -> dict[str, float]:
    """Return the field ``golden`` of the record.  Errors: ExportError when a logit is not finite."""
    import onnx_ir as ir

    inputs, outputs = bundle.golden_rows()
    golden = next(iter(outputs.values()))
    logits, *features = emulated_outputs(model, inputs, name=file)
    if not np.isfinite(logits).all():
        raise ExportError(
            f"{bundle.path}: the logits in {precision} are not finite, because a value exceeds the range of the "
            "data type",
            hint="type --precision bf16: bfloat16 has the range of float32",
        )
    largest = float(np.abs(logits - golden).max())
    also: dict[str, float] = {}
    if features and "features" in outputs:
        also["features_largest_abs"] = float(np.abs(features[0] - outputs["features"]).max())
    if precision in QUANTIZED:
        # Random images differ more from the calibration images than golden images do, so the golden inputs do not show
        # how far their outputs are from those of the float32 graph.
        random = fresh_inputs(bundle, RANDOM)
        plain = emulated_outputs(ir.load(bundle.onnx_path), random, name=bundle.onnx_path.name)
        names = ("random_largest_abs", "random_features_largest_abs")
        for name, here, there in zip(names, emulated_outputs(model, random, name=file), plain, strict=False):
            also[name] = float(np.abs(here - there).max())
    return {
        **also,
        "largest_abs": largest,
        "largest_rel": largest / float(np.abs(golden).max()),
    }
