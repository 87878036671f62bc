"""``model.<precision>.onnx`` of a bundle, and the record beside it with the effects of the precision.

A variant is written after its bundle and does not change it: ``model.<precision>.json`` identifies the bundle and the
graph by hash. ``fp32`` is ``model.onnx`` itself and has no record.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.errors import BundleError
from gmmvit_deploy.graphs.constants import MaskChange
from gmmvit_deploy.writing import sha256_of_file

if TYPE_CHECKING:
    from gmmvit_deploy.artifacts import Bundle
    from gmmvit_deploy.precision import Precision

__all__ = ["Variant", "VariantRecord", "onnx_file", "open_variant", "record_file"]

VARIANT_FORMAT = "gmmvit-variant/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantRecord:
    """Content of ``model.<precision>.json``.

    passes: engine pass that changed the model → number of changed layers.
    constants: layer → name of its mask in this graph.  mask_sha256: layer → SHA-256 of the mask in this precision.
    calibration: source, images and SHA-256 of the data, and each activation's bound; None unless quantised.
    golden: largest difference to the golden logits, the same divided by the largest logit, and argmax agreement;
    emulated on the CPU with every rounding in the graph.
    role_disagreements: nodes whose declared role differs from the role that operators and wiring suggest; the declared
    role applies.
    programs: runner → largest difference to the golden logits when it runs this file, and its limit; or the reason why
    it could not run.
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
    role_disagreements: tuple[str, ...] = ()
    programs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        data = {name: getattr(self, name) for name in self.__slots__}
        return {"format": VARIANT_FORMAT, **data, "masks": [asdict(mask) for mask in self.masks]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> VariantRecord:
        """Rebuild a record.  Errors: KeyError, TypeError or ValueError when ``data`` is not a record of this format."""
        if data["format"] != VARIANT_FORMAT:
            raise ValueError(f"format {data['format']!r}; this version reads {VARIANT_FORMAT!r}")
        fields = {name: value for name, value in data.items() if name != "format"}
        fields["role_disagreements"] = tuple(fields["role_disagreements"])
        return cls(**{**fields, "masks": tuple(MaskChange(**mask) for mask in fields["masks"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """The graph of a bundle in a given precision.  record: None for fp32."""

    precision: Precision
    path: Path
    sha256: str
    record: VariantRecord | None


def onnx_file(precision: Precision) -> str:
    return "model.onnx" if precision == "fp32" else f"model.{precision}.onnx"


def record_file(precision: Precision) -> str:
    return f"model.{precision}.json"


def open_variant(bundle: Bundle, precision: Precision) -> Variant:
    """Open the graph of a bundle in ``precision``.

    Errors: BundleError when it does not exist, was changed, or belongs to another bundle.
    """
    path = bundle.path / onnx_file(precision)
    if precision == "fp32":
        return Variant(precision=precision, path=path, sha256=bundle.manifest.files[path.name], record=None)
    again = f"gmmvit convert {bundle.path} --precision {precision} --force"
    record_path = bundle.path / record_file(precision)
    if not path.is_file() or not record_path.is_file():
        hint = again.removesuffix(" --force")
        raise BundleError(f"{bundle.path}: it has no {path.name} with its record", hint=hint)
    try:
        record = VariantRecord.from_json(json.loads(record_path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise BundleError(f"{record_path}: not the record of a precision: {exc}", hint=again) from exc
    if record.bundle_sha256 != bundle.sha256:
        raise BundleError(
            f"{path}: it was made for bundle {record.bundle_sha256[:12]}…, this bundle is {bundle.sha256[:12]}…",
            hint=again,
        )
    digest = sha256_of_file(path)
    if digest != record.onnx_sha256 or record.precision != precision:
        raise BundleError(
            f"{path}: it is not the graph that its record describes: it was changed or damaged", hint=again
        )
    return Variant(precision=precision, path=path, sha256=digest, record=record)
