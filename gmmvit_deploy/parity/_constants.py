"""Check that the masks and biases in ``model.onnx`` are the result of folding the bundle's weights.

Folding computes each mask and bias once from the trained weights, and stores the result in the graph as a constant.

    graph against manifest   the stored bytes: SHA-256
    graph against weights    |stored − folded here| ≤ 8 · noise + last bit,   noise = max |folded in float32 − float64|

The exp and pow of two processors differ in the last bits, so a bundle that was exported on another machine may differ
from what folding gives here. A constant that folding only moves has no noise, and must be equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
import torch

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.errors import ExportError
from gmmvit_deploy.files.writing import sha256_of_bytes
from gmmvit_deploy.graphs.constants import ConstantRecord, array_of, bytes_of_array
from gmmvit_deploy.graphs.folded import prove_classes, prove_folded, stored_constants
from gmmvit_deploy.models.folding.fold import FoldedConstant, fold
from gmmvit_deploy.parity._verdict import Check, passed_unless
from gmmvit_deploy.parity.reference import Reference
from gmmvit_deploy.tolerances import Noise, limit_from_noise

if TYPE_CHECKING:
    from numpy.typing import NDArray


def check_constants(bundle: Bundle, reference: Reference) -> Check:
    """reference: the network rebuilt from the bundle's weights."""
    folded, exact = fold(reference.model), fold(reference.exact)
    graph = ir.load(bundle.onnx_path).graph
    stored = stored_constants(graph)
    masks, mask_reasons = _stored("mask", stored, bundle.manifest.masks, folded.masks, exact.masks)
    biases, bias_reasons = _stored("bias", stored, bundle.manifest.biases, folded.biases, exact.biases)
    reasons = [f"{bundle.onnx_path.name}: {reason}" for reason in (*mask_reasons, *bias_reasons)]
    weight = reference.model.text_embeddings()
    if not reasons:
        try:
            prove_folded(graph, masks, biases, foreign=reference.model.foreign)
            if weight is not None:
                prove_classes(graph, array_of(weight), bundle.manifest.labels)
        except ExportError as exc:
            reasons.append(f"{bundle.onnx_path.name}: {exc}")
    if reasons:
        summary = f"{len(reasons)} differences from the constants folded from the weights"
    elif weight is not None:
        summary = f"the text embeddings of {len(weight)} classes in the graph are those of the weights, bit for bit"
    elif count := len(folded.masks) + len(folded.biases):
        summary = f"{count} masks and biases in the graph are those folded from the weights"
    else:
        summary = "the folded model has no masks and biases, so the graph has no constants to compare"
    return passed_unless(reasons, "constants", summary, masks=len(folded.masks), biases=len(folded.biases))


def _stored(
    kind: str,
    graph: Mapping[str, NDArray[Any]],
    records: Sequence[ConstantRecord],
    folded: Sequence[FoldedConstant],
    exact: Sequence[FoldedConstant],
) -> tuple[tuple[FoldedConstant, ...], list[str]]:
    """Return the constants that the graph stores for the layers, and why they are not those folded from the weights."""
    left = list(records)
    in_float64 = {(constant.layer, constant.step): array_of(constant.constant) for constant in exact}
    stored, reasons = [], []
    for here in folded:
        record = next((record for record in left if record.layer == here.layer), None)
        if record is None:
            reasons.append(
                f"{here.layer}: the manifest has no {kind} of this layer, but folding the weights gives a {kind}"
            )
            continue
        left.remove(record)
        if record.constant not in graph:
            reasons.append(f"{here.layer}: expected the {kind} {record.constant!r} in the graph, got no such constant")
            continue
        constant = graph[record.constant]
        stored.append(replace(here, constant=torch.from_numpy(constant.copy())))
        digest = sha256_of_bytes(bytes_of_array(constant))
        if digest != record.constant_sha256:
            reasons.append(
                f"{here.layer}: the {kind} in the graph differs from the {kind} in the manifest: expected SHA-256 "
                f"{record.constant_sha256[:12]}…, got {digest[:12]}…"
            )
        folded_here = array_of(here.constant)
        if difference := _difference(constant, folded_here, in_float64.get((here.layer, here.step), folded_here)):
            reasons.append(f"{here.layer}: the {kind} in the graph differs from the {kind} folded here: {difference}")
    reasons += [
        f"{record.layer}: the manifest has a {kind} of this layer, but folding the weights gives no {kind}"
        for record in left
    ]
    return tuple(stored), reasons


def _difference(stored: NDArray[Any], here: NDArray[Any], exact: NDArray[Any]) -> str:
    """Return in words how far a stored constant is beyond the limit from the constant folded here, or ""."""
    if stored.shape != here.shape:
        return f"expected the shape {here.shape}, got {stored.shape}"
    finite = np.isfinite(here) & np.isfinite(exact)
    if not np.array_equal(stored[~finite], here[~finite]):
        return "expected the same infinite entries, got others"
    if not finite.any() or np.array_equal(stored, here):
        return ""
    noise = float(np.abs(here[finite] - exact[finite]).max())
    scale = float(np.abs(exact[finite]).max())
    limit = limit_from_noise(Noise(largest=noise, rms=0.0, scale=scale)).largest if noise else 0.0
    largest = float(np.abs(stored[finite].astype(np.float64) - here[finite]).max())
    return "" if largest <= limit else f"by up to {largest:.2e}, limit {limit:.2e}"
