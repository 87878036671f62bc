"""Convert what a bundle lacks, and open every runner that this machine can try, each in a precision.

int8 is tried in each of its forms:

    static   activations have ranges, which calibration images set; for every runtime
    mixed    as many projections as a gate needs are in the dynamic form or in float32; for OpenVINO
    dynamic  activations are quantised while the network runs; for OpenVINO, needs no images
    merged   as static, in a network that merges similar tokens (`graphs.merged_tokens`); for OpenVINO

The fastest int8 or bf16 programs of the CPU that fail the gate are tried as the first of a cascade (`bundle.cascades`),
unless one nearly as fast passes; with int8 also the merged form.

Graphs that the bundle has are kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.bundle.cascades import KEEP_DECISIONS, read_cascade, write_cascade
from gmmvit_deploy.bundle.gates import Gate
from gmmvit_deploy.bundle.variants import forms_in, graph_file, open_variant, record_of
from gmmvit_deploy.errors import GmmvitError, InputError, RunnerUnavailableError
from gmmvit_deploy.exporting.cascades import THRESHOLD_IMAGES, cascade_from_images
from gmmvit_deploy.exporting.variants import CALIBRATION_IMAGES, variants_from_bundle
from gmmvit_deploy.graphs.merged_tokens import why_not_merged
from gmmvit_deploy.inference.precision import CALIBRATED, SPECS, Form, Precision, graph_precision
from gmmvit_deploy.inference.runner_name import RunnerName
from gmmvit_deploy.parity.inputs import ImageStream
from gmmvit_deploy.progress import OnProgress, Progress, prefixed
from gmmvit_deploy.runtimes.engines.engine_from_onnx import engine_from_bundle, engine_name
from gmmvit_deploy.runtimes.engines.flavors import FLAVORS, find_flavor, visible_gpu
from gmmvit_deploy.runtimes.engines.options import BuildOptions
from gmmvit_deploy.runtimes.programs.image_batches import image_hashes, open_images
from gmmvit_deploy.runtimes.programs.openvino import why_no_openvino
from gmmvit_deploy.runtimes.runners.cascade import CascadeRunner
from gmmvit_deploy.runtimes.runners.names import ON_GPUS
from gmmvit_deploy.runtimes.runners.open import open_runner
from gmmvit_deploy.runtimes.runners.runner import Runner

Graph = tuple[Precision, Form]
_NO_IMAGES = "needs images that set its ranges: type --calibration DATA, with images that are none of those of --data"
_NOT_FOR_GPUS = (
    "the bundle has no int8 graph for GPUs: type gmmvit convert with --precision int8, --calibration and --force"
)
_STATIC_HOLDS = "no projection has to leave the static form for the gate to hold"
PROGRAMS_OF_GPUS = (*ON_GPUS, "tensorrt")
_PRECISIONS_OF_GPUS: tuple[Precision, ...] = ("fp32", "bf16", "fp16", "int8")


def refuse_overlap(bundle: Bundle, calibration: str, gate: ImageStream) -> None:
    """Refuse calibration images that are also among those that judge.  Errors: InputError."""
    hashes = {digest for batch in gate for digest in image_hashes(batch.inputs)}
    for limit in (CALIBRATION_IMAGES, THRESHOLD_IMAGES):
        images = open_images(bundle, calibration, limit=limit)
        both = sum(digest in hashes for batch in images for digest in image_hashes(batch))
        if both:
            raise InputError(
                f"--calibration {calibration}: {both} of its {images.count} images are also among the "
                f"{len(gate.taken)} images of --data; int8 fits the images that calibrated it better than others, so "
                "they cannot judge it",
                hint="give --calibration images of training, and --data images that are in no other split",
            )
        if images.count < limit:
            break


def _graphs_in(bundle: Bundle, precision: Precision) -> tuple[Form, ...]:
    """Return the forms of the graphs that there are; a killed process leaves a record without a graph."""
    held = forms_in(bundle, precision)
    return tuple(form for form in held if (bundle.path / graph_file(precision, form)).exists())


def _programs(*, merged: bool = False) -> Iterator[RunnerName]:
    """Yield the programs to try on this machine: at first, or those of the merged form."""
    for precision, spec in SPECS.items():
        for form in [form for form in spec.forms or ("",) if (form == "merged") == merged]:
            if spec.onnxruntime and form in ("", "static"):
                yield RunnerName("onnxruntime", precision, form=form)
            if spec.openvino_name:
                yield from (RunnerName("openvino", precision, kernels, form) for kernels in (False, True))
    if visible_gpu() is not None and not merged:
        yield from (RunnerName(name, graph) for graph in _PRECISIONS_OF_GPUS for name in PROGRAMS_OF_GPUS)


def _graph_of(program: RunnerName) -> Graph:
    of_openvino = program.runtime == "openvino"
    return graph_precision(program.precision) if of_openvino else program.precision, program.form


def convert_missing(
    bundle: Bundle, calibration: str | None, on_progress: OnProgress, *, gate: Gate
) -> dict[Graph, str]:
    """Write the graphs that the bundle lacks, and return why others could not be written: graph → the reason.

    They are not timed here: the race times all programs in turn. Without a GPU, no int8 graph for GPUs is written.
    gate: what a mixed graph must reach on calibration images that set no range.
    """
    why_not: dict[Graph, str] = {}
    for precision in dict.fromkeys(_graph_of(program)[0] for program in _programs()):
        if precision == "fp32" or precision in CALIBRATED:
            continue
        try:
            if not _graphs_in(bundle, precision):
                variants_from_bundle(bundle, (precision,), timed=False, on_progress=on_progress)
        except GmmvitError as exc:
            why_not[precision, ""] = str(exc)
    held = _graphs_in(bundle, "int8")
    for form in held:
        open_variant(bundle, "int8", form)  # one that is damaged or of another bundle is refused
    if calibration is None:
        why_not |= {("int8", form): _NO_IMAGES for form in ("static", "mixed") if form not in held}
    else:
        if "mixed" not in held:
            holds = "static" in held and _static_holds(bundle, gate)
            why = _STATIC_HOLDS if holds else _mixed(bundle, calibration, on_progress, gate=gate)
            why_not["int8", "mixed"] = why
        if "static" not in _graphs_in(bundle, "int8"):
            like = record_of(bundle, "int8", "mixed")
            why_not["int8", "static"] = _int8(bundle, "static", calibration, on_progress, like=like)
    if "dynamic" not in held:
        why_not["int8", "dynamic"] = _int8(bundle, "dynamic", None, on_progress)
    if "" not in _graphs_in(bundle, "int8"):  # the graph for GPUs, which a calibrated conversion writes where one is
        why_not["int8", ""] = why_not.get(("int8", "static")) or _NOT_FOR_GPUS
    return {graph: why for graph, why in why_not.items() if why}


def _static_holds(bundle: Bundle, gate: Gate) -> bool:
    """Return whether a gate as strict as this one gave the static graph, as no projection had to move."""
    record = record_of(bundle, "int8", "static")
    calibration = (record.calibration if record is not None else None) or {}
    stated = calibration.get("gate", {})
    kept = max(stated.get("keep_decisions") or 0.0, stated.get("keep_neighbours") or 0.0)
    return kept >= gate.min_share and any(row["holds"] for row in calibration["curve"])


def _mixed(bundle: Bundle, calibration: str, on_progress: OnProgress, *, gate: Gate) -> str:
    why = _int8(bundle, "mixed", calibration, on_progress, gate=gate)
    return why or ("" if "mixed" in _graphs_in(bundle, "int8") else _STATIC_HOLDS)


def convert_merged(bundle: Bundle, calibration: str | None, on_progress: OnProgress) -> dict[Graph, str]:
    """Write the merged form of int8 if the bundle lacks it, and return why there is none, as `convert_missing`."""
    import onnx_ir as ir

    if "merged" in _graphs_in(bundle, "int8"):
        return {}
    like = record_of(bundle, "int8", "static") or record_of(bundle, "int8", "mixed")
    if like is None:
        why = "merged tokens need a graph in the static or mixed form whose recipe is taken"
    elif calibration is None:
        why = _NO_IMAGES
    else:
        why = why_not_merged(ir.load(bundle.onnx_path).graph)
        why = why or _int8(bundle, "merged", calibration, on_progress, like=like, merged=True)
    return {("int8", "merged"): why} if why else {}


def _int8(bundle: Bundle, form: Form, calibration: str | None, on_progress: OnProgress, **options: Any) -> str:
    report, for_gpus = prefixed(f"int8, {form}", on_progress), visible_gpu() is not None
    try:
        variants_from_bundle(
            bundle, ("int8",), calibration, for_gpus=for_gpus, timed=False, on_progress=report, **options
        )
    except GmmvitError as exc:
        return str(exc)
    return ""


def opened_programs(
    bundle: Bundle,
    why_not: Mapping[Graph, str],
    stack: ExitStack,
    on_progress: OnProgress,
    *,
    merged: bool = False,
) -> tuple[dict[RunnerName, Runner], dict[RunnerName, str]]:
    """Return (the opened programs, which ``stack`` closes, program → why it cannot run here).

    why_not: graph → why the bundle has none.  merged: open those of the merged form, and no others.
    """
    opened: dict[RunnerName, Runner] = {}
    left_out: dict[RunnerName, str] = {}
    for program in _programs(merged=merged):
        on_progress(Progress(f"open {program}"))
        try:
            opened[program] = stack.enter_context(_opened(program, bundle, why_not, on_progress))
        except GmmvitError as exc:
            left_out[program] = str(exc)
    return opened, left_out


def opened_cascades(
    bundle: Bundle,
    fast: Sequence[RunnerName],
    opened: Mapping[RunnerName, Runner],
    calibration: str | None,
    on_progress: OnProgress,
    *,
    keep_decisions: float | None,
) -> tuple[dict[RunnerName, Runner], dict[RunnerName, str]]:
    """Return (the cascades of fast programs, cascade → why there is none).

    fast: of those ``opened``, whose float32 program is open too.
    calibration: the images that choose thresholds; None takes the thresholds that the bundle has.
    keep_decisions: the share of the decisions to keep; None is `KEEP_DECISIONS`, or that of the bundle's thresholds.
    """
    cascades: dict[RunnerName, Runner] = {}
    left_out: dict[RunnerName, str] = {}
    known: dict[RunnerName, dict[str, NDArray[Any]]] = defaultdict(dict)  # float32 program → its logits of the images
    for program in fast:
        cascade, first, second = replace(program, cascade=True), opened[program], opened[program.stages[1]]
        try:
            if calibration is not None:
                keep = keep_decisions or KEEP_DECISIONS
                of_second = known[program.stages[1]]
                record = cascade_from_images(
                    bundle, first, second, calibration, keep_decisions=keep, known=of_second, on_progress=on_progress
                )
                write_cascade(bundle, program, record)
            else:
                record = read_cascade(bundle, program, first.graph.sha256 if first.graph is not None else "")
                if keep_decisions not in (None, record.keep_decisions):
                    record = record.with_target(keep_decisions)
                    write_cascade(bundle, program, record)
            if not record.threshold:
                raise RunnerUnavailableError(f"float32 computes no image again: {program} keeps enough decisions alone")
            cascades[cascade] = CascadeRunner(first, second)
        except GmmvitError as exc:
            left_out[cascade] = str(exc) if calibration is not None else f"{exc}; {_NO_IMAGES}"
    return cascades, left_out


def _opened(program: RunnerName, bundle: Bundle, why_not: Mapping[Graph, str], on_progress: OnProgress) -> Runner:
    precision, graph = program.precision, _graph_of(program)
    if graph in why_not:
        raise RunnerUnavailableError(why_not[graph])
    if program.runtime == "openvino" and (why := why_no_openvino(precision, dynamic=program.form == "dynamic")):
        raise RunnerUnavailableError(why)
    if program.name not in FLAVORS:
        return open_runner(program, bundle)
    flavor, options = find_flavor(program.name), BuildOptions(precision=precision)
    folder = bundle.path / "engines" / engine_name(options, flavor)
    if not folder.exists():
        engine_from_bundle(bundle, open_variant(bundle, precision), options, flavor, on_progress=on_progress)
    return open_runner(program.name, bundle, engine=folder)
