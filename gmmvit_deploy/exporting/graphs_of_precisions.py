"""Make a graph of a network in another precision.

    GPUs          weights → model → fold → fold for engines → float32 ONNX → Q/DQ (int8, fp8) → cast
    CPUs, int8                                                  model.onnx → Q/DQ

Folding computes each mask once and stores the mask as a constant. Folding for engines rewrites each attention into a
form that TensorRT fuses to a single GPU kernel. Q/DQ are the operators QuantizeLinear and DequantizeLinear. The second
line makes the graphs for CPUs in int8: for a CPU, an attention in the form for engines can be several times the work,
and a runtime converts each float16 tensor to float32 and back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.bundle.variants import VariantRecord
from gmmvit_deploy.checkpoints.weights import model_from_bundle
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.exporting._mixed import Judge
from gmmvit_deploy.exporting._recipes import JUDGED_SHARE_OF_GATE, quantized_by_choice
from gmmvit_deploy.exporting.onnx_from_model import onnx_from_model
from gmmvit_deploy.extras import require
from gmmvit_deploy.graphs.calibration import ranges_of
from gmmvit_deploy.graphs.cast import cast_graph
from gmmvit_deploy.graphs.folded import prove_folded
from gmmvit_deploy.graphs.masks import prove_masks
from gmmvit_deploy.graphs.merged_tokens import with_merged_tokens
from gmmvit_deploy.graphs.quantize import quantize_graph
from gmmvit_deploy.graphs.roles import require_known_roles
from gmmvit_deploy.graphs.smoothing import factors_between, smoothed_by
from gmmvit_deploy.inference.precision import CALIBRATED, QUANTIZED, SPECS, Precision
from gmmvit_deploy.models.folding.engine_forms import pad_heads
from gmmvit_deploy.models.folding.fold import FoldedModel, engine_passes, fold, fold_for_engines
from gmmvit_deploy.progress import OnProgress, ignore
from gmmvit_deploy.runtimes.programs.onnxruntime import calibrate
from gmmvit_deploy.wrong_labels import wrong_labels

if TYPE_CHECKING:
    import onnx_ir as ir
    from numpy.typing import NDArray

    from gmmvit_deploy.bundle.gates import Gate
    from gmmvit_deploy.exporting._recipes import Recipe
    from gmmvit_deploy.images.spec import ImageSpec
    from gmmvit_deploy.models.layers.model import Model
    from gmmvit_deploy.runtimes.programs.image_batches import ImageBatches


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedGraph:
    """A graph in a given precision that is not yet written to a file, with data for its record.

    model: the graph, which is strongly typed: the types of a node's inputs determine the type of the computation.
    folded: the folded model that the graph was exported from.
    constants: layer → name of the layer's mask in the graph.
    mask_sha256: layer → SHA-256 of the bytes of the layer's mask in the graph.
    calibration: the field ``calibration`` of `VariantRecord`; None without calibration.
    """

    model: ir.Model
    folded: FoldedModel
    constants: dict[str, str]
    mask_sha256: dict[str, str]
    calibration: dict[str, Any] | None


def prepared_graph(
    bundle: Bundle,
    precision: Precision,
    *,
    calibration: ImageBatches | None = None,
    padded: bool = True,
    for_cpu: bool = False,
    merged: bool = False,
    recipe: Recipe | None = None,
    gate: Gate | None = None,
    on_progress: OnProgress = ignore,
) -> PreparedGraph:
    """Make the graph of a bundle in another precision, without writing a file.

    for_cpu, merged, recipe: as in `graph_from_model`.  The other arguments are as in `variants_from_bundle`.
    Errors: as in `graph_from_model`, and InputError when calibration images are missing, when they are given for a
    precision that does not use calibration, or when this process cannot build the model.
    """
    import onnx_ir as ir

    spec = SPECS[precision]
    dynamic = "dynamic" in spec.forms and for_cpu and calibration is None
    if spec.calibrated != (calibration is not None) and not dynamic:
        raise InputError(
            f"{precision} {'needs' if spec.calibrated else 'does not use'} calibration images",
            hint="add --calibration FOLDER, --calibration FILE.npz or --calibration KIND:PATH, with images like those "
            "that the model will classify"
            if spec.calibrated
            else f"remove --calibration, or add {' or '.join(CALIBRATED)} to the precisions",
        )
    manifest = bundle.manifest
    prepared = graph_from_model(
        model_from_bundle(manifest, bundle.weights_path),
        precision,
        exported=ir.load(bundle.onnx_path) if for_cpu else None,
        preprocessing=manifest.image if manifest.input_kind == "pixels" else None,
        max_batch=manifest.max_batch,
        calibration=calibration,
        padded=padded,
        for_cpu=for_cpu,
        merged=merged,
        recipe=recipe,
        judge_from=None if gate is None or calibration is None else _judge_from(bundle, gate, calibration),
        multi_label=manifest.task == "multi-label",
        what=str(bundle.path),
        on_progress=on_progress,
    )
    if calibration is not None and prepared.calibration is not None:
        prepared.calibration.update(calibration.record())
    prepared.model.metadata_props.update({"gmmvit.bundle_sha256": bundle.sha256, "gmmvit.precision": precision})
    return prepared


def graph_from_model(
    model: Model,
    precision: Precision,
    *,
    exported: ir.Model | None = None,
    preprocessing: ImageSpec | None,
    max_batch: int,
    calibration: Iterable[NDArray[Any]] | None = None,
    padded: bool = True,
    for_cpu: bool = False,
    merged: bool = False,
    recipe: Recipe | None = None,
    judge_from: Callable[..., Judge] | None = None,
    multi_label: bool = False,
    what: str = "the model",
    on_progress: OnProgress = ignore,
) -> PreparedGraph:
    """Fold a trained model and export a strongly typed graph.

    exported: the float32 graph of the folded model, which is changed; None exports it.
    for_cpu: True for the graph for CPUs of int8, in which names of nodes and constants are those of ``model.onnx``.
    merged: merge tokens (`graphs.merged_tokens`).
    preprocessing, max_batch: as in `onnx_from_model`.  padded: as in `variants_from_bundle`.
    calibration: batches of the graph's input, for int8 and fp8; None writes the dynamic form of int8.
    recipe: how to quantise to int8; None tries several recipes, and takes the one with the best logits.
    judge_from: as in `quantized_by_choice`.
    multi_label: True if a sigmoid follows the logits, which changes how recipes are scored (`signal_to_noise_db`).
    what: the subject of the message for an operator without a known role, for example the path of the bundle.
    Errors:
        FoldError: the model does not meet the requirements of a folding pass, or the pass did not fold the model
        completely.
        ExportError: a check of the graph fails, an operator has no known role and ``precision`` is not fp32, or no
        tokens can be merged.
        InputError: ``calibration`` yields no image, or an activation is not finite for a calibration image.
    """
    types: Precision = "fp32" if for_cpu else precision
    folded = _folded(model, precision, padded=padded, for_cpu=for_cpu)
    graph = exported
    if graph is None:
        graph = onnx_from_model(folded.model, preprocessing=preprocessing, max_batch=max_batch)
    require_known_roles(graph.graph, precision, what=what)
    records, _ = prove_folded(graph.graph, folded.masks, folded.biases, foreign=folded.model.foreign)
    if merged:
        graph = with_merged_tokens(graph)
    notes: dict[str, Any] | None = None
    if calibration is not None:
        if precision == "int8":
            graph, notes = quantized_by_choice(
                graph,
                calibration,
                zero_points=for_cpu,
                types=types,
                over_images=multi_label,
                recipe=recipe,
                judge_from=judge_from,
                on_progress=on_progress,
            )
        else:
            measured = calibrate(graph, calibration)
            ranges = ranges_of(measured, "extremes")
            graph = quantize_graph(graph, precision, ranges)
            notes = {"images": measured.images, "ranges": {name: list(both) for name, both in ranges.items()}}
    elif precision in QUANTIZED:
        graph = quantize_graph(graph, precision, None)
    graph = cast_graph(graph, types)
    constants, hashes = prove_masks(graph.graph, folded.masks, records, types)
    return PreparedGraph(
        model=graph,
        folded=folded,
        constants=constants,
        mask_sha256=hashes,
        calibration=notes,
    )


def _judge_from(bundle: Bundle, gate: Gate, calibration: ImageBatches) -> Callable[..., Judge]:
    """Return what makes the `Judge` of a gate for this bundle, and refuse what cannot be judged before any work."""
    import numpy as np

    manifest = bundle.manifest
    multi = manifest.task == "multi-label"
    if not manifest.has_logits and (gate.keep_decisions or gate.accuracy):
        raise InputError(
            f"{bundle.path}: the bundle has features and no logits, so it decides nothing",
            hint="type --keep-neighbours",
        )
    if manifest.has_logits and gate.keep_neighbours:
        raise InputError(
            f"{bundle.path}: --keep-neighbours judges features, and the bundle answers with logits",
            hint="type --keep-decisions",
        )
    if multi and gate.accuracy:
        raise InputError(
            f"{bundle.path}: --accuracy is for networks with one class for each image, and this one is multi-label",
            hint="type --keep-decisions, which counts the images that keep all labels",
        )
    labels = calibration.labels(manifest.labels) if gate.accuracy else None
    require("openvino", package="openvino", extra="openvino")  # measures what projections gain, minutes later
    gate.require_images(calibration.count // JUDGED_SHARE_OF_GATE, None if labels is None else 1.0)

    def judge(*, rows: NDArray[Any], reference: NDArray[Any], **images: Any) -> Judge:
        labels = calibration.labels(manifest.labels) if gate.accuracy else None
        if labels is not None:
            answers = np.zeros((reference.shape[1],) * 2, np.int64)
            np.add.at(answers, (labels[rows], reference.argmax(1)), 1)
            if why := wrong_labels(answers, manifest.labels):
                raise InputError(
                    f"--calibration {calibration.source}: {why}",
                    hint="type --keep-decisions, which needs no labels, in place of --accuracy",
                )
        return Judge(
            gate=gate,
            rows=rows,
            reference=reference,
            labels=labels,
            thresholds=np.array(manifest.label_set.threshold_logits) if multi else None,
            decides=manifest.has_logits,
            **images,
        )

    return judge


def quantised_again(bundle: Bundle, record: VariantRecord, stored: ir.Model) -> ir.Model:
    """Quantise the bundle's network as a record says, with weights rounded to nearest.

    The graph for CPUs was made from ``model.onnx``; for the graph for GPUs, the network is exported again.
    record: the record of a quantised graph.  stored: this graph, from which the factors of smoothing are read.
    """
    calibration = record.calibration or {}
    recipe = calibration.get("recipe", {})
    graph = _before_quantization(bundle, record)
    if recipe.get("smoothing"):
        graph = smoothed_by(graph, factors_between(graph.graph, stored.graph))
    graph = quantize_graph(
        graph,
        record.precision,
        calibration.get("ranges"),
        zero_points=bool(record.form),
        float32=recipe.get("float32", ()),
        dynamic=recipe.get("dynamic", ()),
    )
    return cast_graph(graph, "fp32" if record.form else record.precision)


def _before_quantization(bundle: Bundle, record: VariantRecord) -> ir.Model:
    import onnx_ir as ir

    if record.form:
        graph = ir.load(bundle.onnx_path)
        return with_merged_tokens(graph) if record.form == "merged" else graph
    manifest = bundle.manifest
    model = model_from_bundle(manifest, bundle.weights_path)
    padded = pad_heads.__name__ in record.passes
    folded = _folded(model, record.precision, padded=padded, for_cpu=False)
    inside = manifest.image if manifest.input_kind == "pixels" else None
    return onnx_from_model(folded.model, preprocessing=inside, max_batch=manifest.max_batch)


def _folded(model: Model, precision: Precision, *, padded: bool, for_cpu: bool) -> FoldedModel:
    folded = fold(model)
    # Engines fuse no attention in float32, and CPUs have other fused kernels: the form for engines would be slower.
    if for_cpu or SPECS[precision].element == "float32":
        return folded
    return fold_for_engines(folded, engine_passes(model.spec, padded=padded, quantized=precision in QUANTIZED))
