"""Read the variants of a bundle, the folder that ``gmmvit export`` writes.

A variant is the bundle's network in another precision. ``gmmvit convert`` adds its graph and its record to the bundle:

    graphs/<precision>.onnx         the graph; for int8, the graph for GPUs
    graphs/int8-<form>.onnx         a graph for CPUs in int8: ``static``, ``mixed``, ``dynamic`` or ``merged``
    graphs/<the same name>.json     the record: hashes of the bundle and the graph, and the effects of the precision
    GRAPH.data                      the weights of a graph with weights of `graphs.weights.EXTERNAL_FROM_BYTES` or more

The graph for GPUs in int8 is in fp16 outside the projections, with attention in the form that TensorRT fuses. A graph
for CPUs has the form of ``model.onnx``, with int8 projections and float32 in all other operators, because CPUs compute
slowly in fp16 and have other fused kernels. Its form says how activations are quantised (`RunnerName`); the static and
the mixed form are calibrated with images, as the graph for GPUs. A bundle can have a graph of each form.

The other files of the bundle do not change. For ``fp32``, the graph is ``model.onnx``, which has no record.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.errors import BundleError
from gmmvit_deploy.files.writing import sha256_of_file
from gmmvit_deploy.graphs.constants import MaskChange
from gmmvit_deploy.graphs.weights import data_path
from gmmvit_deploy.inference.precision import CALIBRATED, QUANTIZED, SPECS
from gmmvit_deploy.inference.runner_name import with_form

if TYPE_CHECKING:
    from gmmvit_deploy.bundle.artifacts import Bundle
    from gmmvit_deploy.inference.precision import Form, Precision

GRAPHS = "graphs"
"""The folder of a bundle with the graphs in other precisions."""
VARIANT_FORMAT = "gmmvit-variant/3"


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantRecord:
    """Content of the record of a graph.

    form: of a graph for CPUs in int8; "" for another graph.
    onnx_sha256, data_sha256: of the graph's file, and of the file of its weights; "" if the former holds the weights.
    passes: name of a folding pass that changed the model → number of modules or parameters that the pass changed.
    constants: layer → name of the layer's mask in the graph.
    mask_sha256: layer → SHA-256 of the layer's mask in this precision.
    masks: the effect of the precision on the mask of each head.
    calibration: the source and the SHA-256 of the calibration images, the SHA-256 of each of them, the number of
    images, and the range of each activation (the smallest and the largest value that do not saturate); for int8 also
    the recipe, what each tried recipe gave on the images that judged it, the processor, and with a gate which
    projections moved, and what each number of them gave (`export`); None for a graph that is not quantised, or is
    quantised in the dynamic form.
    golden: a comparison of the graph's logits with the golden logits, PyTorch's logits recorded at export. The graph's
    logits are computed on the CPU with every rounding of the graph. ``largest_abs`` is the largest absolute difference,
    and ``largest_rel`` is this difference divided by the largest golden logit. For int8 and fp8, ``random_largest_abs``
    is the largest absolute difference between the logits of this graph and of the float32 graph on the random inputs of
    a parity run.
    programs: name of a runner (a runtime that ran the graph) → the largest difference of the runner's logits from the
    golden logits, and the limit; or the reason why the runner was left out, and ``wrong`` if it cannot run the graph
    or exceeds the limit.
    speed: how many times as fast as float32 the CPU of the conversion ran the graph (`runners.speed.measured_speed`);
    empty if this was not measured.
    """

    precision: Precision
    bundle_sha256: str
    onnx_sha256: str
    passes: Mapping[str, int]
    constants: Mapping[str, str]
    mask_sha256: Mapping[str, str]
    masks: tuple[MaskChange, ...]
    calibration: Mapping[str, Any] | None
    golden: Mapping[str, float]
    versions: Mapping[str, str]
    programs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    data_sha256: str = ""
    speed: Mapping[str, Any] = field(default_factory=dict)
    form: Form = ""

    def to_json(self) -> dict[str, Any]:
        data = {name: getattr(self, name) for name in self.__slots__}
        data["masks"] = [asdict(mask) for mask in self.masks]
        return {"format": VARIANT_FORMAT, **data}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> VariantRecord:
        """Errors: KeyError, TypeError or ValueError when ``data`` is not a record of this format."""
        if data["format"] != VARIANT_FORMAT:
            raise ValueError(f"expected the format {VARIANT_FORMAT!r}, got {data['format']!r}")
        fields = {name: value for name, value in data.items() if name != "format"}
        fields["masks"] = tuple(MaskChange(**mask) for mask in fields["masks"])
        return cls(**fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """The graph of a bundle in a precision.  sha256: of the file ``path``.  record: None for fp32."""

    precision: Precision
    path: Path
    sha256: str
    record: VariantRecord | None

    @property
    def form(self) -> Form:
        """The form of a graph for CPUs in int8; "" for another graph."""
        return "" if self.record is None else self.record.form

    @property
    def only_openvino(self) -> bool:
        """True if OpenVINO quantises some activations while it runs. No other runtime runs such a graph."""
        calibration = (self.record.calibration if self.record is not None else None) or {}
        return self.form == "dynamic" or bool(calibration.get("recipe", {}).get("dynamic"))


def graph_file(precision: Precision, form: Form = "") -> str:
    """Return the name of a graph's file in the bundle.  form: of a graph for CPUs in int8."""
    return "model.onnx" if precision == "fp32" else f"{GRAPHS}/{with_form(precision, form)}.onnx"


def record_file(precision: Precision, form: Form = "") -> str:
    """Return the name of the record of a graph.  form: as in `graph_file`."""
    return graph_file(precision, form).removesuffix(".onnx") + ".json"


def forms_in(bundle: Bundle, precision: Precision) -> tuple[Form, ...]:
    """Return the forms of the graphs in a precision of which the bundle has a graph or a record."""
    forms: tuple[Form, ...] = ("", *SPECS[precision].forms)
    names = {form: (graph_file(precision, form), record_file(precision, form)) for form in forms}
    return tuple(form for form in forms if any((bundle.path / name).exists() for name in names[form]))


def cpu_form(bundle: Bundle, precision: Precision) -> Form:
    """Return the form of the graph that CPUs run, unless the user names one: the first form that there is."""
    held, forms = forms_in(bundle, precision), SPECS[precision].forms
    return next((form for form in forms if form in held), forms[0]) if forms else ""


def record_of(bundle: Bundle, precision: Precision, form: Form = "") -> VariantRecord | None:
    """Read the record of a graph; None if the bundle has none.  Errors: BundleError when it cannot be read."""
    path = bundle.path / record_file(precision, form)
    if not path.is_file():
        return None
    try:
        return VariantRecord.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise BundleError(
            f"{path}: expected the JSON record of a graph in another precision: {exc}",
            hint=how_to_convert(bundle, precision, form),
        ) from exc


def recorded_distances(bundle: Bundle, precision: Precision, form: Form = "") -> Mapping[str, float]:
    """Return ``golden`` of the record of a graph, not looking at the graph; empty for fp16 and bf16 without a record.

    Errors: BundleError when the record cannot be read, or is missing in int8 and fp8, whose limits follow from it.
    """
    record = record_of(bundle, precision, form)
    if record is None and precision in QUANTIZED:
        raise BundleError(
            f"{bundle.path}: expected {record_file(precision, form)}, the record of the graph, got none",
            hint=how_to_convert(bundle, precision, form),
        )
    return {} if record is None else record.golden


def open_variant(bundle: Bundle, precision: Precision, form: Form = "") -> Variant:
    """Open the graph of a bundle in ``precision``.

    form: of a graph for CPUs in int8.
    Errors: BundleError when the graph or its record does not exist, cannot be read or was changed, when the variant
    was made from another bundle, or when the graph breaks the contract of a bundle (`graphs.contract`).
    """
    path = bundle.path / graph_file(precision, form)
    if precision == "fp32":
        variant = Variant(precision=precision, path=path, sha256=bundle.manifest.files[path.name], record=None)
        _require_contract(bundle, variant)
        return variant
    again = how_to_convert(bundle, precision, form)
    record_path = bundle.path / record_file(precision, form)
    record = record_of(bundle, precision, form)
    if record is None or not path.is_file():
        if not form and forms_in(bundle, precision) == ("dynamic",):
            raise BundleError(
                f"{bundle.path}: {precision} was converted without calibration images, which gives a graph for "
                "OpenVINO on CPUs only; TensorRT and ONNX Runtime need ranges from images",
                hint=again,
            )
        got = "only one of them" if path.is_file() or record is not None else "neither"
        raise BundleError(
            f"{bundle.path}: expected the graph {graph_file(precision, form)} and its record "
            f"{record_file(precision, form)}, got {got}",
            hint=again,
        )
    if record.bundle_sha256 != bundle.sha256:
        raise BundleError(
            f"{path}: expected a graph of the bundle {bundle.sha256[:12]}…, got a graph of the "
            f"bundle {record.bundle_sha256[:12]}…",
            hint=again,
        )
    digest = sha256_of_file(path)
    data = data_path(path)
    damaged = bool(record.data_sha256) and (not data.is_file() or sha256_of_file(data) != record.data_sha256)
    if digest != record.onnx_sha256 or damaged or (record.precision, record.form) != (precision, form):
        raise BundleError(
            f"{path}: the file was changed or damaged: expected the file that {record_path.name} describes", hint=again
        )
    variant = Variant(precision=precision, path=path, sha256=digest, record=record)
    _require_contract(bundle, variant)
    return variant


def how_to_convert(bundle: Bundle, precision: Precision, form: Form = "") -> str:
    """Return the hint of an error message: the command that writes a graph into the bundle, in place of its own."""
    if form == "merged":
        return f"type gmmvit optimize {bundle.path} --data DATA --calibration IMAGES --keep-decisions SHARE"
    dynamic = form == "dynamic"
    calibration = " --calibration IMAGES" if precision in CALIBRATED and not dynamic else ""
    gate = " --keep-decisions SHARE" if form == "mixed" else ""
    # All calibrated graphs of int8 are written at once.
    force = " --force" if any((held == "dynamic") == dynamic for held in forms_in(bundle, precision)) else ""
    return f"type gmmvit convert {bundle.path} --precision {precision}{calibration}{gate}{force}"


def _require_contract(bundle: Bundle, variant: Variant) -> None:
    manifest = bundle.manifest
    outputs = tuple(output.name for output in manifest.outputs)
    name = data_path(variant.path).name
    has_data = name in manifest.files if variant.record is None else bool(variant.record.data_sha256)
    data = name if has_data else ""
    if problem := _problem(variant.path, variant.sha256, manifest.input_kind, outputs, data):
        raise BundleError(f"{variant.path}: {problem}")


@lru_cache(maxsize=16)
def _problem(path: Path, sha256: str, input_name: str, outputs: tuple[str, ...], data: str) -> str:
    """Return the first difference of a graph from the contract of a bundle.  A file is read once for each hash."""
    from gmmvit_deploy.graphs.contract import file_problem

    return file_problem(path, input_name=input_name, outputs=outputs, data=data)
