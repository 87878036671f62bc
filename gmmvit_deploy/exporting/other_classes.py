"""Take the graphs of an earlier export of the same CLIP or SigLIP, and exchange the classes in them.

    logits = W n(x) + b        x: the image embedding; only W, b and the number of classes depend on the labels

W is a constant in float32 in every precision. So the graph is, bit for bit, that of a fresh export, which would trace
the image tower for most of its time. Whatever is compared with PyTorch at export is compared again.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.bundle.artifacts import Bundle, Manifest, open_bundle
from gmmvit_deploy.errors import BundleError
from gmmvit_deploy.graphs.folded import exchange_classes
from gmmvit_deploy.models.families import spec_to_json

if TYPE_CHECKING:
    import onnx_ir as ir
    from numpy.typing import NDArray


def bundle_of_same_tower(path: Path, manifest: Manifest) -> Bundle | None:
    """Return the bundle at ``path`` if its ``model.onnx`` differs from that of ``manifest`` in the classes alone."""
    try:
        earlier = open_bundle(path)
    except BundleError:
        return None
    return earlier if _of_tower(earlier.manifest) == _of_tower(manifest) else None


def with_other_classes(graph: Path, weight: NDArray[Any]) -> ir.Model:
    """Return a graph of a bundle with other text embeddings (C, D).  Errors: ExportError for another classifier."""
    import onnx_ir as ir

    model = ir.load(graph)
    exchange_classes(model.graph, weight)
    return model


def _of_tower(manifest: Manifest) -> tuple[Any, ...]:
    """Return what the graph follows from, but the classes."""
    spec = {name: value for name, value in spec_to_json(manifest.spec).items() if name not in ("classes", "prompts")}
    return (
        manifest.checkpoint["sha256"],
        spec,
        manifest.input_kind,
        manifest.max_batch,
        manifest.image,
        manifest.output_names,
        manifest.unit_length,
        manifest.opset,
        manifest.versions,
    )
