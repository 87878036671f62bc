"""Collect the results of a runner over all inputs of a parity run, and judge them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.bundle.variants import recorded_errors
from gmmvit_deploy.parity._accuracy import (
    Accuracy,
    accuracy_of_resized,
    gate_of,
    lower_ratio,
    without_calibration_images,
)
from gmmvit_deploy.parity._calibration import check_calibration
from gmmvit_deploy.parity._decisions import decisions_of
from gmmvit_deploy.parity._invariance import check_invariance
from gmmvit_deploy.parity._localize import localize
from gmmvit_deploy.parity._multi_label import MultiLabelAccuracy, accuracy_on
from gmmvit_deploy.parity._numeric import STORED, Distances, SetNumbers, check_numeric
from gmmvit_deploy.parity._preprocessing import Sample, check_preprocessing, expected_of_golden
from gmmvit_deploy.parity._quantised import GRAPH, QuantisedGraph
from gmmvit_deploy.parity._served import check_served
from gmmvit_deploy.parity._stages import Stages
from gmmvit_deploy.parity._trained_accuracy import TrainedAccuracy
from gmmvit_deploy.parity._verdict import Check, skipped_check, worst_of
from gmmvit_deploy.parity.reference import Known, Reference
from gmmvit_deploy.parity.report import RunnerReport
from gmmvit_deploy.parity.suspects import explain
from gmmvit_deploy.precision import QUANTIZED, SPECS, Precision
from gmmvit_deploy.progress import OnProgress, Progress, prefixed
from gmmvit_deploy.runner_name import KERNELS_SUFFIX
from gmmvit_deploy.runtimes.runners.open import open_runner
from gmmvit_deploy.runtimes.runners.runner import Runner
from gmmvit_deploy.tolerances import Limit

if TYPE_CHECKING:
    from gmmvit_deploy.bundle.artifacts import Bundle
    from gmmvit_deploy.parity.check import ParityOptions

__all__ = ["Tally", "needs_model"]

_NO_LOGITS = "the bundle has no logits; its features are compared by the check numeric"
_CALIBRATED = "the graph was calibrated on these images, so they cannot judge it; add others to --data"


def _not_judged(name: str, why: str, *, typed: bool) -> Check:
    """Return a check that could not judge: skipped, or undecided if the user typed its gate."""
    return Check(name=name, verdict="undecided", summary=why, reasons=(why,)) if typed else skipped_check(name, why)


def needs_model(why: str) -> str:
    return f"needs the model in PyTorch: {why}"


class _AtBatch:
    """What a runner computed in batches of one size.

    distances: (name of the inputs, True for the features beside logits) → the distances.
    broken: the number of images of the data without finite logits.
    accuracy: None without labels, or without PyTorch's logits.
    """

    def __init__(self, bundle: Bundle, accuracy: Accuracy | MultiLabelAccuracy | None) -> None:
        manifest = bundle.manifest
        self.distances: dict[tuple[str, bool], Distances] = {}
        self.decisions = decisions_of(manifest.label_set)
        over_images = manifest.task == "multi-label"
        self.stages = Stages(self.decisions.decided if manifest.has_logits else None, over_images=over_images)
        self.accuracy = accuracy
        self.broken = 0


class Tally:
    """Collect a runner's results over all inputs, which it computes in batches of each size of ``batches``.

    Kernels, and what a runtime makes of a graph, depend on the size: so the runner is judged one by one and in batches,
    as it is served, and the worst result of a check counts.
    reference: None if this process cannot build the model.  why: the reason.
    graphs: (path of the bundle, precision, True for the graph that CPUs run) → the quantised graph; runners of the
    same graph share it.
    """

    def __init__(
        self,
        runner: Runner,
        options: ParityOptions,
        reference: Reference | None,
        why: str,
        graphs: dict[tuple[Path, Precision, bool], QuantisedGraph],
    ) -> None:
        bundle = runner.bundle
        self._bundle, self._runner, self._options = bundle, runner, options
        self._reference, self._why = reference, why
        for_cpu = runner.device == "cpu"
        self._recorded = recorded_errors(bundle, runner.precision, for_cpu=for_cpu)
        key = (bundle.path, runner.precision, for_cpu)
        if runner.precision in QUANTIZED and key not in graphs:
            graphs[key] = QuantisedGraph(bundle, runner.precision, for_cpu=for_cpu)
        self._graph = graphs.get(key)
        smallest = min(least for least, _ in runner.ranges)
        self.batches = tuple(sorted({smallest, max(smallest, min(options.batch, runner.max_batch))}))
        self._at = {batch: _AtBatch(bundle, self._new_accuracy()) for batch in self.batches}
        self._left_out = 0  # labelled images that calibrated the graph
        self._kept_logits: list[NDArray[Any]] = []
        self._plain: Runner | None = None  # the runner without kernels

    def _new_accuracy(self) -> Accuracy | MultiLabelAccuracy | None:
        data = self._options.data
        if data is None or self._reference is None or not self._bundle.manifest.has_logits:
            return None
        return accuracy_on(data, self._bundle.manifest)

    @property
    def accuracy(self) -> Accuracy | MultiLabelAccuracy | None:
        """Knows which logits are right; None without labels or without PyTorch's logits."""
        return self._at[self.batches[0]].accuracy

    def add(self, name: str, known: Known, *, keep: bool = False) -> None:
        """Run inputs with the runner, and record how far the logits are from PyTorch's logits.

        name: the name of the set of inputs.  keep: True for golden and random inputs, whose logits are also stored;
        False for the data, whose decisions, stages and accuracy are also recorded.
        """
        inputs, exact = known.batch.inputs, known.exact
        of_graph = self._graph.logits(inputs, real=not keep) if self._graph is not None else None
        new = np.ones(len(inputs), bool) if self._graph is None else self._graph.new(inputs)
        without_kernels = None if keep or not new.any() else self._without_kernels(inputs[new])
        for batch, at in self._at.items():
            answers = self._runner.rows_all(inputs, batch=batch)
            logits = answers[self._runner.outputs[0]]
            self._add_distances(name, known, batch, logits, answers.get("features"), of_graph)
            if keep:
                if batch == self.batches[-1]:
                    self._kept_logits.append(logits)
                continue
            if logits.shape != exact.shape:
                logits = np.full(exact.shape, np.nan, np.float32)
            self._add_images(known, at, logits, answers.get("features"), new, of_graph, without_kernels)
        if self.accuracy is not None and not keep:
            self._left_out += sum(label is not None for label in compress(known.batch.labels, ~new))

    def _add_distances(
        self,
        name: str,
        known: Known,
        batch: int,
        logits: NDArray[Any],
        features: NDArray[Any] | None,
        of_graph: NDArray[Any] | None,
    ) -> None:
        noise = self._bundle.stored_noise(known.exact) if self._reference is None else None
        sets = self._at[batch].distances
        distances = sets.setdefault((name, False), Distances(name, batch=batch, stored=noise))
        distances.add(logits, known.trained, known.exact, of_graph)
        if known.features is not None and features is not None:
            of_features = sets.setdefault((name, True), Distances(f"{name}, features", batch=batch))
            of_features.add(features, *known.features)

    def _add_images(
        self,
        known: Known,
        at: _AtBatch,
        logits: NDArray[Any],
        features: NDArray[Any] | None,
        new: NDArray[Any],
        of_graph: NDArray[Any] | None,
        without_kernels: NDArray[Any] | None,
    ) -> None:
        """Add images of the data.  new: which did not calibrate the graph; ``without_kernels`` has only these."""
        trained, exact = known.trained, known.exact
        finite = np.isfinite(logits).all(1)
        at.broken += int((new & ~finite).sum())
        judged = finite & new
        if self._bundle.manifest.has_logits:
            where = list(compress(known.batch.where, judged))
            at.decisions.add(where, logits[judged], trained[judged], exact[judged])
        if at.accuracy is not None:
            at.accuracy.add(list(compress(known.batch.labels, new)), trained[new], logits[new])
        if new.any():
            both = None if features is None or known.features is None else (features[new], known.features[1][new])
            at.stages.add(
                logits[new],
                trained[new],
                exact[new],
                of_graph=None if of_graph is None else of_graph[new],
                without_kernels=without_kernels,
                features=both,
            )

    def _without_kernels(self, inputs: NDArray[Any]) -> NDArray[Any] | None:
        """Return the logits of the runner's graph and runtime without this project's kernels; None without kernels."""
        runner = self._runner
        if self._graph is None or not runner.name.endswith(KERNELS_SUFFIX):
            return None
        if self._plain is None:
            name = runner.name.removesuffix(KERNELS_SUFFIX)
            self._plain = open_runner(name, self._bundle, precision=runner.precision)
            self._plain.judged = True
        return self._plain.rows(inputs)

    def _sets(self, *, features: bool) -> list[SetNumbers]:
        """Return the distances of the logits, or of the features beside logits, for each set of inputs."""
        key = "features_largest_abs" if features else "largest_abs"
        return [
            distances.numbers(self._runner.precision, self._recorded_distance(inputs, key))
            for at in self._at.values()
            for (inputs, of_features), distances in at.distances.items()
            if of_features == features
        ]

    def _recorded_distance(self, inputs: str, key: str) -> float | None:
        """Return what conversion recorded for these inputs; the data has the distance of the golden inputs."""
        if self._recorded is None:
            return None
        return self._recorded.get(f"random_{key}" if inputs == "random" else key)

    def report(
        self,
        kept: dict[str, Known],
        samples: Sequence[Sample],
        trained: TrainedAccuracy,
        checked: dict[Path, list[str]],
        on_progress: OnProgress,
    ) -> RunnerReport:
        """Judge the collected results, and run the checks that send further batches to the runner.

        kept: the sets of inputs whose logits are stored. The last set is also sent in other batches.
        checked: as in `check_preprocessing`.
        """
        runner, bundle, reference, sets = self._runner, self._bundle, self._reference, self._sets(features=False)
        name, sent = list(kept.items())[-1]
        inputs = sent.batch.inputs
        limit = next(numbers.limit for numbers in sets if numbers.inputs == name)
        widest = max((numbers.limit for numbers in sets), key=lambda numbers: numbers.largest)
        judged = [numbers for numbers in sets if numbers.inputs in kept or self._graph is None]
        beside = self._sets(features=True)
        features = [numbers for numbers in beside if self._graph is None or numbers.inputs.partition(",")[0] in kept]
        numeric = check_numeric(judged, features)
        if reference is not None and any(numbers.problems() for numbers in [*judged, *features]):
            numeric = self._explained(numeric, reference, kept, limit)
        progress = prefixed(runner.name, on_progress)
        decisions = self._judged_decisions(widest)
        checks = [
            numeric,
            decisions,
            trained.judged(self._judged_accuracy()),
            self._judged_stages(),
            check_invariance(runner, inputs, sent.exact, limit, on_progress=progress),
            self._checked_calibration(),
            check_preprocessing(bundle, runner, widest, samples=samples, of_graph=self._graph, checked=checked),
        ]
        if runner.server is not None:
            expected, words = sent.exact, "PyTorch's float64 logits" if reference is not None else STORED
            if self._graph is not None:
                expected, words = self._graph.logits(inputs), GRAPH
            server, golden = runner.server, expected_of_golden(bundle, self._graph)
            checks.append(
                check_served(
                    bundle, runner, server, inputs, expected, golden, widest, reference=words, on_progress=progress
                )
            )
        else:
            checks.append(skipped_check("served", f"{runner.name} runs in this process, without a server"))
        if reference is None:
            checks.append(skipped_check("localize", needs_model(self._why)))
        elif self._options.localize:
            progress(Progress("block by block"))
            checks.append(localize(reference, runner, inputs))
        else:
            checks.append(skipped_check("localize", "not requested; add --localize"))
        if self._plain is not None:
            self._plain.close()
        return RunnerReport(
            runner=runner.name,
            precision=runner.precision,
            batches=self.batches,
            provenance=runner.provenance(),
            checks=tuple(checks),
            points=self._at[decisions.details.get("batch", self.batches[0])].decisions.points(),
        )

    def _judged_decisions(self, limit: Limit) -> Check:
        gate = self._options.keep_decisions
        why = self._no_images() if self._bundle.manifest.has_logits else _NO_LOGITS
        if why:
            return _not_judged("decisions", why, typed=gate is not None)
        least = gate or SPECS[self._runner.precision].kept_gate
        checks = {
            batch: at.decisions.check(limit)
            if least == 1
            else at.decisions.kept(least, broken=at.broken, blamed=at.stages.blamed, skipped=_CALIBRATED)
            for batch, at in self._at.items()
        }
        return worst_of(checks, lambda details: float(details["agreement"]))

    @property
    def _db_of_graph(self) -> float | None:
        """The quantised graph's signal-to-noise ratio on the data; None without images that can judge it."""
        return self._at[self.batches[0]].stages.of_graph

    def _judged_stages(self) -> Check:
        options = self._options
        why, typed = self._no_images(), options.snr_db is not None or options.least_cosine is not None
        if self._graph is None and not typed:
            why = f"{self._runner.precision} is not quantised"
        if self._graph is not None and self._db_of_graph is None:
            why, typed = f"not judged on images: {why or _CALIBRATED}", True
        if why:
            return _not_judged("stages", why, typed=typed)
        checks = {
            batch: at.stages.check(options.snr_db, options.least_cosine, skipped=_CALIBRATED)
            for batch, at in self._at.items()
        }
        return worst_of(checks, lambda details: float(details["db"]))

    def _no_images(self) -> str:
        """Return why there are no real images; empty if there are some."""
        if self._reference is None:
            return f"needs PyTorch's logits of further images: {self._why}"
        return "" if self._options.data is not None else "only real images show decisions; type --data folder:VAL"

    def _judged_accuracy(self) -> Check:
        typed = self._options.gate is not None
        if self._reference is None:
            return _not_judged("accuracy", f"needs PyTorch's logits of further images: {self._why}", typed=typed)
        if not self._bundle.manifest.has_logits:
            return _not_judged("accuracy", _NO_LOGITS, typed=typed)
        if self.accuracy is None:
            check = _not_judged("accuracy", "no labelled images were given; add --data", typed=typed)
        else:
            gate = gate_of(self._runner.precision, self._options.gate)
            checks = {batch: at.accuracy.check(gate) for batch, at in self._at.items() if at.accuracy is not None}
            check = worst_of(checks, lambda details: lower_ratio(details)[0])
            check = without_calibration_images(check, self._left_out)
        return accuracy_of_resized(check, self._bundle.manifest.spec)

    def _checked_calibration(self) -> Check:
        precision = self._runner.precision
        if self._graph is None:
            return skipped_check("calibration", f"{precision} needs no calibration")
        if self._reference is None and not self._graph.variant.for_cpu:
            return skipped_check("calibration", needs_model(self._why))
        return check_calibration(self._bundle, self._graph, self._db_of_graph)

    def _explained(self, numeric: Check, reference: Reference, kept: dict[str, Known], limit: Limit) -> Check:
        if len({rows.shape[1:] for rows in self._kept_logits}) > 1:
            return numeric
        inputs = np.concatenate([known.batch.inputs for known in kept.values()])
        guess = explain(self._bundle, reference, inputs, np.concatenate(self._kept_logits), limit.largest)
        why = f"likely cause: {guess}; with this mistake, PyTorch gives the logits of the runner"
        return replace(numeric, reasons=(*numeric.reasons, why)) if guess else numeric
