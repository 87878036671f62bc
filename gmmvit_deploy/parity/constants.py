"""Check that the masks and biases in ``model.onnx`` equal, bit for bit, the result of folding the bundle's weights.

Folding computes each mask and bias once from the trained weights, and stores the result in the graph as a constant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx

from gmmvit_deploy.artifacts import Bundle
from gmmvit_deploy.errors import ExportError
from gmmvit_deploy.folding.fold import FoldedConstant, fold, recorded_passes
from gmmvit_deploy.graphs.constants import ConstantRecord, bytes_of_array
from gmmvit_deploy.graphs.proof import prove_folded
from gmmvit_deploy.layers.model import Model
from gmmvit_deploy.parity.verdict import Check
from gmmvit_deploy.writing import sha256_of_bytes

__all__ = ["check_constants"]


def check_constants(bundle: Bundle, model: Model) -> Check:
    """Compare the constants in the graph and in the manifest with the constants folded from ``model``.

    The reasons of the check name each layer whose constant differs.
    model: the network rebuilt from the bundle's weights.
    """
    folded = fold(model, recorded_passes(model.spec, bundle.manifest.folding))
    reasons, of_graph = [], []
    try:
        masks, biases = map(_digests, prove_folded(onnx.load(bundle.onnx_path), folded, foreign=model.foreign))
    except ExportError as exc:
        of_graph = [f"{bundle.onnx_path.name}: {exc}"]
        masks, biases = _digests_of(folded.masks), _digests_of(folded.biases)
    for kind, expected, records in (("mask", masks, bundle.manifest.masks), ("bias", biases, bundle.manifest.biases)):
        reasons += _manifest_problems(kind, expected, _digests(records))
    reasons += of_graph
    count = len(folded.masks) + len(folded.biases)
    return Check(
        name="constants",
        verdict="failed" if reasons else "passed",
        summary=_equal(count)
        if not reasons
        else f"{len(reasons)} differences from the masks and biases folded from the weights",
        reasons=tuple(reasons),
        details={"masks": len(folded.masks), "biases": len(folded.biases)},
    )


def _equal(count: int) -> str:
    if not count:
        return "the folded model has no masks and biases, so the graph has no constants to compare"
    return f"{count} masks and biases in the graph equal those folded from the weights, bit for bit"


def _digests(records: Sequence[ConstantRecord]) -> dict[str, str]:
    """Return name of a layer → SHA-256 of the layer's trained constant."""
    return {record.layer: record.trained_sha256 for record in records}


def _digests_of(constants: Sequence[FoldedConstant]) -> dict[str, str]:
    return {constant.layer: sha256_of_bytes(bytes_of_array(constant.trained)) for constant in constants}


def _manifest_problems(kind: str, expected: Mapping[str, str], recorded: Mapping[str, str]) -> list[str]:
    return [
        f"{layer}: the {kind} in the manifest differs from the {kind} folded from the weights: "
        f"expected {_short(expected.get(layer))}, got {_short(recorded.get(layer))}"
        for layer in sorted(recorded.keys() | expected.keys())
        if recorded.get(layer) != expected.get(layer)
    ]


def _short(sha256: str | None) -> str:
    return f"SHA-256 {sha256[:12]}…" if sha256 else "no constant"
