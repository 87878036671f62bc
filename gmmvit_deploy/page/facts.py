"""Read the parity at export and the metadata of a bundle from its manifest, as rows of text."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from gmmvit_deploy.bundle.variants import onnx_file
from gmmvit_deploy.precision import PRECISIONS

if TYPE_CHECKING:
    from gmmvit_deploy.bundle.artifacts import Bundle

__all__ = ["ExportParity", "bundle_card", "export_parity"]

_LARGEST = "_largest_abs"  # the suffix of the entry of each program in a manifest's export_parity


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportParity:
    """Parity with PyTorch, as measured when the bundle was exported.

    differences: program → largest difference between the program's logits and PyTorch's logits, on the golden inputs
    (the inputs that are recorded at export).
    limit: the largest allowed difference.  skipped: program → reason why the program was not available at export.
    """

    differences: dict[str, float]
    limit: float
    skipped: dict[str, str]

    @property
    def passed(self) -> bool:
        """True if at least 1 program was compared with PyTorch, and every difference is within the limit."""
        return bool(self.differences) and all(largest <= self.limit for largest in self.differences.values())

    def sentence(self) -> str:
        """Return the verdict as a sentence."""
        if not self.differences:
            return "Parity at export: not checked. The manifest records no comparison with PyTorch."
        program, largest = max(self.differences.items(), key=lambda item: item[1])
        verdict = "passed" if self.passed else "FAILED"
        return (
            f"Parity at export: {verdict}. The logits of {len(self.differences)} programs were compared with PyTorch; "
            f"the largest difference is {largest:.2g} ({program}), and the limit is {self.limit:.2g}."
        )


def export_parity(bundle: Bundle) -> ExportParity:
    """Read from the bundle's manifest how the logits compared with PyTorch's logits at export."""
    numbers = bundle.manifest.export_parity
    return ExportParity(
        differences={key.removesuffix(_LARGEST): value for key, value in numbers.items() if key.endswith(_LARGEST)},
        limit=numbers.get("limit", math.nan),
        skipped=dict(bundle.manifest.export_skipped),
    )


def bundle_card(bundle: Bundle) -> dict[str, str]:
    """Return name → value of a bundle's hash, model, input, classes, masks, precisions and versions."""
    manifest, image = bundle.manifest, bundle.manifest.image
    sizes = {name: value for name, value in asdict(manifest.spec).items() if name not in ("family", "mask")}
    normalisation = ""
    if image.normalisation is not None:
        mean, std = (", ".join(f"{value:g}" for value in values) for values in image.normalisation)
        normalisation = f"; mean {mean}; std {std}"
    rows = {
        "bundle": str(bundle.path),
        "SHA-256": bundle.sha256,
        "checkpoint": ", ".join(f"{name} {value}" for name, value in manifest.checkpoint.items()),
        "model": f"{manifest.spec.family}, {manifest.spec.mask} mask",
        "sizes": ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in sizes.items()),
        "trainable parameters": f"{manifest.trainable_parameters:,}",
        "image": f"{image.height}×{image.width}, {image.mode}, resized by {image.resize_text}{normalisation}",
        "input": f"{manifest.input_kind}: {bundle.input_dtype} (1..{manifest.max_batch}, "
        f"{', '.join(map(str, bundle.input_shape))})",
        "classes": f"{manifest.spec.classes}",
        "masks": f"{len(manifest.masks)}, each folded into a constant",
        "precisions": ", ".join(name for name in PRECISIONS if (bundle.path / onnx_file(name)).is_file()),
        "made with": ", ".join(f"{name} {value}" for name, value in manifest.versions.items()),
    }
    return {name: value for name, value in rows.items() if value}
