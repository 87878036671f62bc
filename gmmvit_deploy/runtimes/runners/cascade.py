"""Run a cascade: a fast precision, and nearly undecided images again in float32 (`inference.cascade`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gmmvit_deploy.bundle.cascades import CascadeRecord, read_cascade
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.inference import DEFERRED
from gmmvit_deploy.inference.cascade import Cascade
from gmmvit_deploy.runtimes.runners.runner import Inspection, Runner

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gmmvit_deploy.bundle.artifacts import Bundle


def require_decisions(bundle: Bundle) -> None:
    """Refuse a bundle in which no image is nearly undecided.  Errors: InputError."""
    manifest = bundle.manifest
    if not manifest.has_logits:
        raise InputError(f"{bundle.path}: it has features and no logits, so no image is nearly undecided")
    if len(manifest.labels) < 2 and manifest.task != "multi-label":
        raise InputError(f"{bundle.path}: the network has a single logit, so no image is nearly undecided")


def label_thresholds(bundle: Bundle) -> NDArray[Any] | None:
    """Return the thresholds (C,) of a multi-label network as logits; None for a single-label network."""
    manifest = bundle.manifest
    return np.array(manifest.label_set.threshold_logits, np.float32) if manifest.task == "multi-label" else None


class CascadeRunner(Runner):
    """Two runners of a bundle: the fast one answers, and float32 answers the images that it defers.

    Each compares itself with the reference outputs, in place of the whole.
    """

    record: CascadeRecord

    def __init__(self, first: Runner, second: Runner) -> None:
        """first: in a fast precision.  second: in float32.  `close` closes both.

        Errors: InputError when the bundle decides nothing.  Every error of `read_cascade`.
        """
        bundle = first.bundle
        super().__init__(bundle)
        require_decisions(bundle)
        self.name, self.precision, self.form = first.name, first.precision, first.form
        self.graph, self.runtime = first.graph, first.runtime
        self.first, self.second = first, second
        self.record = read_cascade(bundle, first.runner_name, first.graph.sha256 if first.graph is not None else "")
        self._cascade = Cascade(
            lambda batch: list(first.run_all(batch).values()),
            lambda batch: list(second.run_all(batch).values()),
            self.record.threshold,
            label_thresholds(bundle),
        )

    @property
    def stages(self) -> tuple[Runner, ...]:
        return self.first, self.second

    @property
    def settings(self) -> dict[str, str]:
        again = f"margins below {self.record.threshold:.4g}"
        return {**self.first.settings, "computed again in float32": again}

    def _program_provenance(self) -> dict[str, str]:
        second = {f"float32 {name}": value for name, value in self.second.provenance().items()}
        return {**self.first.provenance(), **second, "threshold": repr(self.record.threshold)}

    def inspectable(self) -> Inspection:
        return self.first.inspectable()

    def computed(self, batch: NDArray[Any]) -> Sequence[NDArray[Any]]:
        return self._cascade.answers(batch)[:-1]

    def _run(self, batch: NDArray[Any]) -> NDArray[Any]:
        return self.computed(batch)[0]

    def run_all(self, batch: NDArray[Any]) -> Mapping[str, NDArray[Any]]:
        self._require(batch)
        return dict(zip((*self.outputs, DEFERRED), self._cascade.answers(batch), strict=True))

    def _require(self, batch: NDArray[Any]) -> None:
        self._check(batch)

    def close(self) -> None:
        self.first.close()
        self.second.close()
