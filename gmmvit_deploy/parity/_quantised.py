"""The quantised graph of a runner, computed with every rounding and apart from any runtime.

With t PyTorch's float64 logits, g the graph's and r the runner's, the share of the graph's rounding in the runner is

    Σ (r − t)(g − t) / Σ (g − t)²

It is 1 for a runtime with exactly the graph's logits. Correct runtimes round some values to a neighbouring step, and
had 0.4 to 1 over any 8 images, in a ViT and in DINOv2 ViT-S/14. The float32 graph in place of int8 has 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.bundle.variants import open_variant
from gmmvit_deploy.inference.precision import Form, Precision
from gmmvit_deploy.runtimes.programs.emulated_precision import CountedGraph
from gmmvit_deploy.runtimes.programs.image_batches import image_hashes

GRAPH = "the quantised graph's logits"
_MIN_KEPT = 0.25


class QuantisedGraph:
    """The int8 or fp8 graph of a bundle, with its record."""

    def __init__(self, bundle: Bundle, precision: Precision, form: Form) -> None:
        """form: of a graph for CPUs.  Errors: as `open_variant`."""
        variant = open_variant(bundle, precision, form)
        if variant.record is None:
            raise ValueError(f"expected a quantised precision, got {precision}")
        self.path, self.record = variant.path, variant.record
        self._calibrated_on = frozenset(self.record.calibration["image_sha256"] if self.record.calibration else ())
        self._graph = CountedGraph(ir.load(self.path), name=self.path.name)
        self._last: tuple[Any, NDArray[Any]] | None = None

    def new(self, inputs: NDArray[Any]) -> NDArray[Any]:
        """Return which images (B, …) did not calibrate the graph."""
        if not self._calibrated_on:
            return np.ones(len(inputs), bool)
        return np.array([digest not in self._calibrated_on for digest in image_hashes(inputs)], bool)

    def logits(self, inputs: NDArray[Any], *, real: bool = False) -> NDArray[Any]:
        """Compute the logits (B, C) of a batch, once for all runners that ask for it one after the other.

        real: True to count the values that saturate for the images that did not calibrate the graph.
        """
        if self._last is None or self._last[0] is not inputs:
            self._last = inputs, self._graph.logits(inputs, self.new(inputs) if real else None)
        return self._last[1]

    def saturated(self) -> dict[str, float]:
        """Return the name of each projection → the share of its input's values that saturate on the real images."""
        return self._graph.saturated()


class RoundingKept:
    """Accumulate the share of the graph's rounding that a runner has, as defined at the head of this module."""

    def __init__(self) -> None:
        self._shared = self._whole = 0.0

    def add(self, logits: NDArray[Any], of_graph: NDArray[Any], exact: NDArray[Any]) -> None:
        """Add the logits (B, C) of the runner, of the graph and of PyTorch.  Rows that are not finite are left out."""
        finite = np.isfinite(logits).all(1) & np.isfinite(of_graph).all(1)
        rounding = (of_graph - exact)[finite]
        self._shared += float(((logits - exact)[finite] * rounding).sum())
        self._whole += float((rounding**2).sum())

    @property
    def share(self) -> float | None:
        """The share; None if the graph has no rounding."""
        return self._shared / self._whole if self._whole else None


def rounding_problem(share: float | None) -> str:
    """Return what is wrong if a runner has too small a share of the graph's rounding (`RoundingKept`), or ""."""
    if share is None or share >= _MIN_KEPT:
        return ""
    return (
        f"the logits have {share:.2f} of the quantised graph's rounding, expected at least {_MIN_KEPT:g}: the runner "
        "computes another graph, such as the float32 graph"
    )
