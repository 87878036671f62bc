"""Write a bundle's network in another precision, as ``model.<precision>.onnx`` with a record of the checks.

    GPUs          weights → model → fold → fold for engines → float32 ONNX → Q/DQ (int8, fp8) → cast → check → record
    CPUs, int8    weights → model → fold                    → float32 ONNX → Q/DQ                    → check → record

Folding computes each mask once and stores the mask as a constant. Folding for engines rewrites each attention into a
form that TensorRT fuses to a single GPU kernel. Q/DQ are the operators QuantizeLinear and DequantizeLinear. The second
line makes ``model.int8.cpu.onnx``: for a CPU, an attention in the form for engines can be several times the work, and a
runtime converts each float16 tensor to float32 and back. If a step fails, no file is written or replaced.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gmmvit_deploy.bundle.artifacts import Bundle, tool_versions
from gmmvit_deploy.bundle.variants import (
    FOR_CPUS,
    Variant,
    VariantRecord,
    onnx_file,
    onnx_files,
    open_variant,
    record_file,
)
from gmmvit_deploy.checkpoints.weights import model_from_bundle
from gmmvit_deploy.errors import ExportError, InputError
from gmmvit_deploy.export._numeric_proof import proven_programs
from gmmvit_deploy.export.golden import RANDOM, fresh_inputs
from gmmvit_deploy.export.onnx_from_model import onnx_from_model
from gmmvit_deploy.files.leftovers import temporary_folder
from gmmvit_deploy.files.writing import new_file, require_free_file, sha256_of_file
from gmmvit_deploy.graphs.calibration import bounds_of
from gmmvit_deploy.graphs.cast import cast_graph
from gmmvit_deploy.graphs.masks import changes_of, prove_masks
from gmmvit_deploy.graphs.proof import prove_folded
from gmmvit_deploy.graphs.quantize import QUANTIZED, quantize_graph
from gmmvit_deploy.graphs.roles import require_known_roles, role_disagreements
from gmmvit_deploy.graphs.weights import files_of, write_graph
from gmmvit_deploy.models.folding.fold import FoldedModel, engine_passes, fold, fold_for_engines, recorded_passes
from gmmvit_deploy.models.folding.head_padding import pad_heads
from gmmvit_deploy.progress import OnProgress, Progress, ignore
from gmmvit_deploy.runtimes.programs.emulated_precision import emulated_outputs
from gmmvit_deploy.runtimes.programs.image_batches import open_images
from gmmvit_deploy.runtimes.programs.int8_products import int8_saturates
from gmmvit_deploy.runtimes.programs.onnxruntime import calibrate
from gmmvit_deploy.runtimes.runners.open import proof_programs
from gmmvit_deploy.tolerances import limit_from_stored

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import ModelProto

    from gmmvit_deploy.images.spec import ImageSpec
    from gmmvit_deploy.models.folding.passes import FoldingPass
    from gmmvit_deploy.models.layers.model import Model
    from gmmvit_deploy.precision import Precision
    from gmmvit_deploy.runtimes.programs.image_batches import ImageBatches

__all__ = [
    "CALIBRATION_IMAGES",
    "PreparedGraph",
    "graph_before_quantization",
    "graph_from_model",
    "prepared_graph",
    "variant_from_bundle",
    "variants_from_bundle",
]

CALIBRATION_IMAGES = 512
"""The maximum number of calibration images, if the user states no other number."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedGraph:
    """A graph in a given precision that is not yet written to a file, with data for its record.

    proto: the graph, which is strongly typed: the types of a node's inputs determine the type of the computation.
    folded: the folded model that the graph was exported from.
    constants: layer → name of the layer's mask in the graph.
    mask_sha256: layer → SHA-256 of the bytes of the layer's mask in the graph.
    calibration: the field ``calibration`` of `VariantRecord`; None without calibration.
    role_disagreements: the result of `graphs.roles.role_disagreements`.
    """

    proto: ModelProto
    folded: FoldedModel
    constants: dict[str, str]
    mask_sha256: dict[str, str]
    calibration: dict[str, Any] | None
    role_disagreements: tuple[str, ...]


def variant_from_bundle(
    bundle: Bundle,
    precision: Precision,
    *,
    calibration: ImageBatches | None = None,
    padded: bool = True,
    force: bool = False,
) -> Variant:
    """Write the graph ``model.<precision>.onnx`` and the record ``model.<precision>.json`` into the bundle.

    For int8, the graph for CPUs, ``model.int8.cpu.onnx``, is also written. For fp32, nothing is written, because
    ``model.onnx`` is the graph in fp32.

    calibration: real images; required for int8 and fp8, and not allowed for other precisions.
    padded: if engines do not fuse attention with the model's head dim, pad the heads with zeros to a larger head dim.
    force: replace an existing graph and record.
    Errors, each of which leaves the bundle unchanged:
        InputError: calibration images are missing, or are given for a precision that does not use calibration; or this
        process cannot build the model, because the code of the model is in a file that the user did not name.
        FoldError: the model does not meet the requirements of a folding pass, or the pass did not fold the model
        completely.
        ExportError: an operator has no known role; a check of the graph fails; a logit of the graph is not finite; or
        the difference of a runtime's logits from the golden logits (PyTorch's logits, recorded at export) exceeds the
        limit.
        OutputError: a graph exists and ``force`` is not set, or writing fails.
    All files are on the disk before the first of them replaces an earlier file. If the process is killed between these
    replacements, the record and a graph do not match, which `open_variant` reports.
    Returns the graph ``model.<precision>.onnx``.
    """
    _require_free(bundle, (precision,), force=force)
    return _written(bundle, precision, calibration=calibration, padded=padded, force=force)


def variants_from_bundle(
    bundle: Bundle,
    precisions: Sequence[Precision],
    calibration: str | None = None,
    calibration_images: int = CALIBRATION_IMAGES,
    *,
    padded: bool = True,
    force: bool = False,
    on_progress: OnProgress = ignore,
) -> list[Variant]:
    """Write the graphs of a bundle in several precisions, as `variant_from_bundle` writes each.

    calibration: the source of the images that calibrate int8 and fp8, as in `open_images`; None without these.
    calibration_images: the maximum number of images.
    padded, force: as in `variant_from_bundle`.
    on_progress: called at the beginning of each precision.
    Errors: as in `variant_from_bundle`; OutputError leaves the bundle unchanged if a graph of any precision exists.
    """
    _require_free(bundle, precisions, force=force)
    variants = []
    for number, precision in enumerate(precisions):
        on_progress(Progress(f"write {precision}", number, len(precisions)))
        images = (
            open_images(bundle, calibration, limit=calibration_images)
            if calibration and precision in QUANTIZED
            else None
        )
        variants.append(_written(bundle, precision, calibration=images, padded=padded, force=force))
    return variants


def _require_free(bundle: Bundle, precisions: Sequence[Precision], *, force: bool) -> None:
    """Check that no graph exists, before the work: calibration can take minutes.  Errors: OutputError."""
    for name in (name for precision in precisions if precision != "fp32" for name in onnx_files(precision)):
        require_free_file(bundle.path / name, force=force, fixed_name=True)


def _written(
    bundle: Bundle, precision: Precision, *, calibration: ImageBatches | None, padded: bool, force: bool
) -> Variant:
    if precision == "fp32":
        return open_variant(bundle, precision)
    graphs = (False, True) if precision in FOR_CPUS else (False,)
    with temporary_folder("convert") as folder, ExitStack() as closing:
        record_of = partial(_recorded, bundle, precision, folder, calibration=calibration, padded=padded)
        records = [record_of(for_cpu=for_cpu) for for_cpu in graphs]
        record = replace(records[0], cpu=records[1] if precision in FOR_CPUS else None)
        text = json.dumps(record.to_json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        made = sorted(folder.iterdir())
        files = [closing.enter_context(new_file(bundle.path / path.name, force=force)) for path in made]
        notes = closing.enter_context(new_file(bundle.path / record_file(precision), force=True))
        for file, path in zip(files, made, strict=True):
            file.write(path.read_bytes())
        notes.write(text.encode())
        for file in (*files, notes):  # a full disk is met here, before the first file is replaced
            file.flush()
            os.fsync(file.fileno())
    return open_variant(bundle, precision)


def _recorded(
    bundle: Bundle, precision: Precision, folder: Path, *, calibration: ImageBatches | None, padded: bool, for_cpu: bool
) -> VariantRecord:
    """Write a graph to ``folder`` and measure it.  Returns the graph's record."""
    prepared = prepared_graph(bundle, precision, calibration=calibration, padded=padded, for_cpu=for_cpu)
    path = folder / onnx_file(precision, for_cpu=for_cpu)
    write_graph(prepared.proto, path)
    hashes = [sha256_of_file(file) for file in files_of(path)]
    variant = Variant(precision=precision, path=path, sha256=hashes[0], record=None)
    golden = _measured(bundle, prepared.proto, precision, path.name)
    return VariantRecord(
        precision=precision,
        bundle_sha256=bundle.sha256,
        onnx_sha256=hashes[0],
        data_sha256="".join(hashes[1:]),
        passes={name: len(changed) for name, changed in prepared.folded.passes.items() if changed},
        constants=prepared.constants,
        mask_sha256=prepared.mask_sha256,
        masks=tuple(changes_of(prepared.folded.masks, "fp32" if for_cpu else precision)),
        calibration=prepared.calibration,
        golden=golden,
        versions=tool_versions(),
        role_disagreements=prepared.role_disagreements,
        programs=_proven(bundle, variant, golden["largest_abs"]),
    )


def prepared_graph(
    bundle: Bundle,
    precision: Precision,
    *,
    calibration: ImageBatches | None = None,
    padded: bool = True,
    for_cpu: bool = False,
) -> PreparedGraph:
    """Make the graph of a bundle in another precision, without writing a file.

    for_cpu: as in `graph_from_model`.  The other arguments are as in `variant_from_bundle`.
    Errors: as in `graph_from_model`, and InputError when calibration images are missing, when they are given for a
    precision that does not use calibration, or when this process cannot build the model.
    """
    if (precision in QUANTIZED) != (calibration is not None):
        raise InputError(
            f"{precision} {'needs' if precision in QUANTIZED else 'does not use'} calibration images",
            hint="add --calibration FOLDER, --calibration FILE.npz or --calibration KIND:PATH, with images like those "
            "that the model will classify"
            if precision in QUANTIZED
            else "remove --calibration, or add int8 or fp8 to the precisions",
        )
    manifest = bundle.manifest
    prepared = graph_from_model(
        model_from_bundle(manifest, bundle.weights_path),
        precision,
        preprocessing=manifest.image if manifest.input_kind == "pixels" else None,
        max_batch=manifest.max_batch,
        calibration=calibration,
        padded=padded,
        for_cpu=for_cpu,
        what=str(bundle.path),
    )
    if calibration is not None and prepared.calibration is not None:
        prepared.calibration.update(calibration.record())
    for key, value in (("gmmvit.bundle_sha256", bundle.sha256), ("gmmvit.precision", precision)):
        prepared.proto.metadata_props.add(key=key, value=value)
    return prepared


def graph_from_model(
    model: Model,
    precision: Precision,
    *,
    preprocessing: ImageSpec | None,
    max_batch: int,
    calibration: Iterable[NDArray[Any]] | None = None,
    padded: bool = True,
    for_cpu: bool = False,
    what: str = "the model",
) -> PreparedGraph:
    """Fold a trained model and export a strongly typed graph.

    Unless ``for_cpu`` is True or the precision is fp32, the attentions are rewritten into forms that engines fuse.

    for_cpu: True for the graph for CPUs of int8, with attentions in the form of the folded model, and with float32 in
    all operators that are not quantised. Apart from the Q/DQ nodes and the quantised weights, the names of nodes and
    constants are those of ``model.onnx``.
    preprocessing, max_batch: as in `onnx_from_model`.  padded: as in `variant_from_bundle`.
    calibration: batches of the graph's input, for int8 and fp8.
    what: the subject of the message for an operator without a known role, for example the path of the bundle.
    Errors:
        FoldError: the model does not meet the requirements of a folding pass, or the pass did not fold the model
        completely.
        ExportError: a check of the graph fails, or an operator has no known role and ``precision`` is not fp32.
        InputError: ``calibration`` yields no image, or an activation is not finite for a calibration image.
    """
    types: Precision = "fp32" if for_cpu else precision
    folded = _folded(model, precision, padded=padded, for_cpu=for_cpu)
    proto = onnx_from_model(folded.model, preprocessing=preprocessing, max_batch=max_batch)
    require_known_roles(proto.graph, precision, what=what)
    records, _ = prove_folded(proto, folded, foreign=folded.model.foreign)
    disagreements = role_disagreements(proto.graph)
    notes: dict[str, Any] | None = None
    shapes = list(proto.graph.value_info)
    if calibration is not None:
        histograms = calibrate(proto, calibration)
        bounds = bounds_of(histograms, precision)
        proto = quantize_graph(proto, precision, bounds)
        notes = {"images": histograms.images, "bounds": dict(bounds)}
    proto = cast_graph(proto, types)
    if types == "fp32":  # quantisation and cast change neither the type nor the shape of a tensor that they keep
        kept = {name for node in proto.graph.node for name in node.output}
        proto.graph.value_info.extend(value for value in shapes if value.name in kept)
    constants, hashes = prove_masks(proto, folded.masks, records, types)
    return PreparedGraph(
        proto=proto,
        folded=folded,
        constants=constants,
        mask_sha256=hashes,
        calibration=notes,
        role_disagreements=disagreements,
    )


def graph_before_quantization(bundle: Bundle, record: VariantRecord, *, for_cpu: bool) -> ModelProto:
    """Export again the float32 graph from which a quantised graph was made.  The tensor names are the same.

    record: the record of the quantised graph.  for_cpu: True for the graph for CPUs.
    """
    manifest = bundle.manifest
    model = model_from_bundle(manifest, bundle.weights_path)
    passes = recorded_passes(model.spec, record.passes)
    padded = pad_heads.__name__ in record.passes
    folded = _folded(model, record.precision, padded=padded, for_cpu=for_cpu, passes=passes)
    inside = manifest.image if manifest.input_kind == "pixels" else None
    return onnx_from_model(folded.model, preprocessing=inside, max_batch=manifest.max_batch)


def _folded(
    model: Model, precision: Precision, *, padded: bool, for_cpu: bool, passes: Sequence[FoldingPass] | None = None
) -> FoldedModel:
    folded = fold(model, passes)
    # Engines fuse no attention in float32, and CPUs have other fused kernels: the form for engines would be slower.
    if for_cpu or precision == "fp32":
        return folded
    return fold_for_engines(folded, engine_passes(model.spec, padded=padded, quantized=precision in QUANTIZED))


def _proven(bundle: Bundle, variant: Variant, recorded: float) -> dict[str, dict[str, Any]]:
    """Run the graph in every CPU runtime that supports the precision, and compare the logits with the golden logits.

    Each runtime runs the graph twice: with the runtime's built-in operators, and with this project's CPU kernels. For
    bf16, OpenVINO loads the float32 graph ``model.onnx`` and chooses where to round, as in a Triton server.
    recorded: the largest absolute difference between the golden logits and the logits that `_measured` computed with
    every rounding of the graph; for int8 and fp8, the limit is a multiple of this difference.
    Returns name of a runner → its largest absolute difference and the limit, or the reason why the runner was skipped.
    Errors: ExportError when a runtime that supports the precision cannot load the graph, or when the difference of a
    runtime's logits from the golden logits exceeds the precision's limit (`tolerances`). In int8, on a CPU where the
    products of OpenVINO saturate, OpenVINO is skipped in place of this error: the graph is right, and runs elsewhere.
    """
    inputs, outputs = bundle.golden_rows()
    first, expected = next(iter(outputs.items()))
    limit = limit_from_stored(bundle.stored_noise(expected), variant.precision, recorded=recorded).largest
    differences, skipped = proven_programs(
        proof_programs(bundle, variant),
        inputs,
        {first: expected},
        {first: limit},
        what=variant.path.name,
        openvino_is_wrong=int8_saturates() if variant.precision == "int8" else "",
    )
    return {
        **{name: {"largest_abs": largest[first], "limit": limit} for name, largest in differences.items()},
        **{name: {"skipped": why.replace(f"{variant.path.parent}/", "")} for name, why in skipped.items()},
    }


def _measured(bundle: Bundle, proto: ModelProto, precision: Precision, file: str) -> dict[str, float]:
    """Return the field ``golden`` of the record.  Errors: ExportError when a logit is not finite."""
    import onnx

    golden = bundle.golden_set()
    logits, *features = emulated_outputs(proto, golden.inputs, name=file)
    if not np.isfinite(logits).all():
        raise ExportError(
            f"{bundle.path}: the logits in {precision} are not finite, because a value exceeds the range of the "
            "data type",
            hint="type --precision bf16: bfloat16 has the range of float32",
        )
    largest = float(np.abs(logits - golden.logits).max())
    also: dict[str, float] = {}
    if features and golden.features is not None:
        also["features_largest_abs"] = float(np.abs(features[0] - golden.features).max())
    if precision in QUANTIZED:
        # Random images differ more from the calibration images than golden images do, so the golden inputs do not show
        # how far their outputs are from those of the float32 graph.
        random = fresh_inputs(bundle, RANDOM)
        plain = emulated_outputs(onnx.load(bundle.onnx_path), random, name=bundle.onnx_path.name)
        names = ("random_largest_abs", "random_features_largest_abs")
        for name, here, there in zip(names, emulated_outputs(proto, random, name=file), plain, strict=False):
            also[name] = float(np.abs(here - there).max())
    return {
        **also,
        "largest_abs": largest,
        "largest_rel": largest / float(np.abs(golden.logits).max()),
        "argmax_agreement": float((logits.argmax(1) == golden.logits.argmax(1)).mean()),
    }
