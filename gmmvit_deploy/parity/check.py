"""Compare any number of runners with PyTorch: all parity checks in a single pass over the inputs.

A runner is a runtime, an engine or a server that computes the logits.

    constants         the masks and biases in the graph are those of the manifest, and those computed from the
                      bundle's weights
    reference         PyTorch's logits on this machine equal PyTorch's logits at export, within a tolerance
    numeric           the runner's logits are near PyTorch's float64 logits; the limit is derived from the error of
                      PyTorch's float32 logits
    decisions         the runner predicts PyTorch's class, or a class whose logit is so close in PyTorch that numeric
                      error can swap the two; for int8 and fp8, enough images of the data keep their class
    accuracy          the runner's top-1 on labelled images reaches the gate, a share of PyTorch's top-1; the check
                      compares the confidence interval of the difference with the lowest difference allowed.
                      PyTorch's top-1 reaches the expected accuracy, if one is given, and no other preprocessing gives
                      a clearly higher one. Images that calibrated the runner's graph are left out
    batch invariance  the logits of an image do not depend on the other images of the batch
    calibration       a quantised graph loses on the data no more than on images of its calibration
    preprocessing     this package, the graph and the server turn the same images into the same tensors
    served            a server answers every request with the logits of the images in this request
    localize          the error of each block is within the tolerance; otherwise the check names the first block with a
                      larger error

The checks ``constants`` and ``reference`` examine the bundle; the other checks examine a runner. Some checks do not
always run: ``accuracy`` needs labelled images, ``calibration`` runs only for int8 and fp8 and needs images,
``preprocessing`` needs the mean and std of the images, ``served`` runs only for Triton, and ``localize`` only with
--localize. Without labelled images, ``accuracy`` is undecided for a model that export resized to another image size.

In the pass, PyTorch and each runner compute the logits of every input once. The pass keeps statistics of the images of
the data, and no images.

The code of a model can be in a file that gmmvit runs only if the command names the file. Without the file, the golden
inputs of the bundle and the logits that PyTorch computed for them at export are the reference: ``numeric``,
``decisions``, ``batch invariance``, ``preprocessing`` and ``served`` run on the golden inputs. The other checks need
PyTorch's logits of further inputs, and are skipped with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from gmmvit_deploy.bundle.artifacts import Bundle, tool_versions
from gmmvit_deploy.bundle.variants import calibration_hashes, is_dynamic, open_variant, recorded_errors
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.graphs.quantize import QUANTIZED
from gmmvit_deploy.images.data.images import Images
from gmmvit_deploy.parity._accuracy import (
    Accuracy,
    accuracy_of_resized,
    classes_of,
    gate_of,
    without_calibration_images,
)
from gmmvit_deploy.parity._calibration import check_calibration
from gmmvit_deploy.parity._constants import check_constants
from gmmvit_deploy.parity._decisions import KEPT, decisions_of
from gmmvit_deploy.parity._invariance import check_invariance
from gmmvit_deploy.parity._localize import localize
from gmmvit_deploy.parity._multi_label import MultiLabelAccuracy
from gmmvit_deploy.parity._numeric import Distances, SetNumbers, check_numeric, check_stored
from gmmvit_deploy.parity._preprocessing import Sample, check_preprocessing, samples_of
from gmmvit_deploy.parity._served import check_served
from gmmvit_deploy.parity._trained_accuracy import TrainedAccuracy
from gmmvit_deploy.parity._verdict import Check, skipped_check
from gmmvit_deploy.parity.inputs import ImageStream, OnBroken, golden_batch, random_batch
from gmmvit_deploy.parity.reference import Known, Reference, known_batch, why_no_model
from gmmvit_deploy.parity.report import ParityReport, RunnerReport
from gmmvit_deploy.parity.suspects import explain
from gmmvit_deploy.progress import OnProgress, Progress, ignore, prefixed
from gmmvit_deploy.reports.reporting import described_bundle
from gmmvit_deploy.runtimes.programs.emulated_precision import emulated_logits
from gmmvit_deploy.runtimes.programs.image_batches import image_hashes
from gmmvit_deploy.runtimes.runners.runner import Runner
from gmmvit_deploy.tolerances import Limit

__all__ = ["ParityOptions", "check_parity"]

_BATCH = 32
_NO_LOGITS = "the bundle has no logits; its features are compared by the check numeric"
_STORED = "the logits that PyTorch computed at export"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityOptions:
    """Options of a parity run.

    data: the real images; None checks without real images.
    limit: the number of images to use, spread evenly over the data; None uses all images.
    on_broken: ``fail`` ends the run at a broken image; ``skip`` leaves broken images out.
    keep_decisions: the share of the images of which a quantised runner must keep the decision; None uses `KEPT`.
    gate: the share of PyTorch's top-1 that the runner must reach; None uses MLPerf's gate for the runner's precision.
    expected_accuracy: the accuracy that training measured on such images, which PyTorch must reach; None if unknown.
    localize: True also measures the error of each block.
    """

    data: Images | None = None
    limit: int | None = None
    on_broken: OnBroken = "fail"
    gate: float | None = None
    keep_decisions: float | None = None
    expected_accuracy: float | None = None
    localize: bool = False

    def __post_init__(self) -> None:
        gate_of("fp32", self.gate)
        for option, share in (("keep-decisions", self.keep_decisions), ("expect-accuracy", self.expected_accuracy)):
            # No number of images shows that all keep their decision.
            if share is not None and not (0 < share < 1 or (share == 1 and option == "expect-accuracy")):
                raise InputError(f"--{option}: expected a share of the images, such as 0.97, got {share}")
        if self.on_broken not in ("fail", "skip"):
            raise InputError(f"--on-broken: expected fail or skip, got {self.on_broken!r}")
        if self.limit is not None and self.limit < 1:
            raise InputError(f"--limit: expected at least 1, got {self.limit}")


def check_parity(
    bundle: Bundle,
    runners: Sequence[Runner],
    options: ParityOptions | None = None,
    *,
    skipped: Sequence[str] = (),
    on_progress: OnProgress = ignore,
) -> ParityReport:
    """Run every check on every runner.

    If this process cannot build the model, the checks compare with the logits stored at export.
    skipped: runners that were left out, each with the reason, for the report.
    A difference between a runner and PyTorch that exceeds a limit raises no error: the report's verdict is ``failed``.
    Errors: InputError when the data does not fit the bundle.
    ImageError on a broken image, unless ``on_broken`` is ``skip``.
    Every error that a runner raises.
    """
    if not runners:
        raise InputError("expected at least one runner, got an empty list")
    options = options or ParityOptions()
    why = why_no_model(bundle)
    reference = None if why else Reference(bundle)
    tallies = [_Tally(bundle, runner, options, reference, why) for runner in runners]
    golden, stored = golden_batch(bundle)
    kept: dict[str, Known] = {}
    for name, batch in (("golden", golden), *(() if reference is None else (("random", random_batch(bundle)),))):
        on_progress(Progress(f"{name} inputs"))
        kept[name] = Known(batch, stored, stored, None) if reference is None else known_batch(reference, batch)
        for tally in tallies:
            tally.add(name, kept[name], keep=True)
    stream: ImageStream | None = None
    samples: list[Sample] = []
    trained = TrainedAccuracy(options.expected_accuracy, tallies[0].accuracy)
    if reference is not None and options.data is not None:
        stream = ImageStream(
            bundle=bundle,
            images=options.data,
            batch=min(_BATCH, bundle.manifest.max_batch),
            limit=options.limit,
            on_broken=options.on_broken,
        )
        for batch in stream:
            known = known_batch(reference, batch)
            trained.add(batch.labels, known.trained)
            on_progress(Progress(stream.images.name, stream.handed_out + len(stream.broken_indices), stream.count))
            for tally in tallies:
                tally.add(f"data: {stream.images.name}", known)
        samples = samples_of(bundle, reference, stream)
        trained.try_others(reference, stream, on_progress)
    checked: dict[Path, list[str]] = {}
    reports = [tally.report(kept, samples, trained, checked, on_progress) for tally in tallies]
    of_bundle = (
        tuple(skipped_check(name, _needs_model(why)) for name in ("constants", "reference"))
        if reference is None
        else (
            check_constants(bundle, reference),
            check_stored(stored, kept["golden"].trained, kept["golden"].exact),
        )
    )
    return ParityReport(
        bundle=described_bundle(bundle),
        versions=tool_versions(),
        data=None if stream is None else stream.described(),
        checks=of_bundle,
        runners=tuple(reports),
        skipped=tuple(skipped),
    )


def _needs_model(why: str) -> str:
    return f"needs the model in PyTorch: {why}"


class _Tally:
    """Collect a runner's results over all inputs.

    reference: None if this process cannot build the model.  why: the reason.
    """

    def __init__(
        self, bundle: Bundle, runner: Runner, options: ParityOptions, reference: Reference | None, why: str
    ) -> None:
        self._bundle, self._runner, self._options = bundle, runner, options
        self._reference, self._why = reference, why
        self._quantized = runner.precision in QUANTIZED
        manifest = bundle.manifest
        self._recorded = recorded_errors(bundle, runner.precision, for_cpu=runner.device == "cpu")
        # The key is (name of the inputs, True for the features beside logits).
        self._distances: dict[tuple[str, bool], Distances] = {}
        self._decisions = decisions_of(manifest.label_set)
        self._calibrated_on = calibration_hashes(bundle, runner.precision, for_cpu=runner.device == "cpu")
        self._broken = 0  # images of the data without finite logits
        self._left_out = 0  # labelled images that calibrated the graph
        self.accuracy: Accuracy | MultiLabelAccuracy | None = None
        if options.data is not None and reference is not None and manifest.has_logits:
            classes = classes_of(options.data.classes, manifest.labels, options.data.name)
            multi = manifest.task == "multi-label"
            self.accuracy = (
                MultiLabelAccuracy(manifest.label_set, classes) if multi else Accuracy(manifest.labels, classes)
            )
        self._kept_logits: list[NDArray[Any]] = []

    def add(self, inputs: str, known: Known, *, keep: bool = False) -> None:
        """Run a batch with the runner, and record how far the logits are from PyTorch's logits.

        inputs: the name of the set of inputs.  keep: True for golden and random inputs, whose logits are also stored;
        False for the data, whose accuracy is also recorded.
        """
        answers = self._runner.rows_all(known.batch.inputs)
        logits = answers[self._runner.outputs[0]]
        noise = self._bundle.stored_noise(known.exact) if self._reference is None else None
        distances = self._distances.setdefault((inputs, False), Distances(inputs, stored=noise))
        distances.add(logits, known.trained, known.exact, self._of_graph(known.batch.inputs) if keep else None)
        if known.features is not None:
            name = f"{inputs}, features"
            self._distances.setdefault((inputs, True), Distances(name)).add(answers["features"], *known.features)
        if keep:
            self._kept_logits.append(logits)
        if logits.shape != known.exact.shape:
            logits = np.full(known.exact.shape, np.nan, np.float32)
        new = np.ones(len(logits), bool) if keep else self._new(known.batch.inputs)
        finite = np.isfinite(logits).all(1)
        self._broken += 0 if keep else int((new & ~finite).sum())
        judged = finite & new
        where = list(compress(known.batch.where, judged))
        if self._bundle.manifest.has_logits and not (keep and self._quantized):
            self._decisions.add(where, logits[judged], known.trained[judged], known.exact[judged])
        if self.accuracy is not None and not keep:
            labels = known.batch.labels
            self.accuracy.add(list(compress(labels, new)), known.trained[new], logits[new])
            self._left_out += sum(label is not None for label in compress(labels, ~new))

    def _of_graph(self, inputs: NDArray[Any]) -> NDArray[Any] | None:
        """Return the logits of a quantised graph with every rounding; None for a graph that is not quantised."""
        if not self._quantized:
            return None
        runner = self._runner
        path = open_variant(self._bundle, runner.precision, for_cpu=runner.device == "cpu").path
        return emulated_logits(onnx.load(path), inputs, name=path.name)

    def _new(self, inputs: NDArray[Any]) -> NDArray[Any]:
        """Return which images (B, …) did not calibrate the runner's graph."""
        if not self._calibrated_on:
            return np.ones(len(inputs), bool)
        return np.array([digest not in self._calibrated_on for digest in image_hashes(inputs)], bool)

    def _sets(self, *, features: bool) -> list[SetNumbers]:
        """Return the distances of the logits, or of the features beside logits, for each set of inputs."""
        key = "features_largest_abs" if features else "largest_abs"
        return [
            distances.numbers(self._runner.precision, self._recorded_distance(inputs, key))
            for (inputs, of_features), distances in self._distances.items()
            if of_features == features
        ]

    def _recorded_distance(self, inputs: str, key: str) -> float | None:
        """Return what conversion recorded for these inputs; a record of an earlier version has the golden inputs only.

        The golden images and the data have the distance of the golden inputs.
        """
        if self._recorded is None:
            return None
        of_random = self._recorded.get(f"random_{key}") if inputs == "random" else None
        return self._recorded.get(key) if of_random is None else of_random

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
        judged = [numbers for numbers in sets if numbers.inputs in kept or not self._quantized]
        beside = self._sets(features=True)
        features = [numbers for numbers in beside if not self._quantized or numbers.inputs.partition(",")[0] in kept]
        numeric = check_numeric(judged, features)
        if reference is not None and any(numbers.problems() for numbers in [*judged, *features]):
            numeric = self._explained(numeric, reference, kept, limit)
        progress = prefixed(runner.name, on_progress)
        checks = [
            numeric,
            self._judged_decisions(widest),
            trained.judged(self._judged_accuracy()),
            check_invariance(runner, inputs, sent.exact, limit, on_progress=progress),
            self._checked_calibration(samples, progress),
            check_preprocessing(bundle, runner, widest, samples=samples, checked=checked),
        ]
        if runner.server is not None:
            words = "PyTorch's float64 logits" if reference is not None else _STORED
            server = runner.server
            checks.append(
                check_served(bundle, runner, server, inputs, sent.exact, widest, reference=words, on_progress=progress)
            )
        else:
            checks.append(skipped_check("served", f"{runner.name} runs in this process, without a server"))
        if reference is None:
            checks.append(skipped_check("localize", _needs_model(self._why)))
        elif self._options.localize:
            progress(Progress("block by block"))
            checks.append(localize(reference, runner, inputs))
        else:
            checks.append(skipped_check("localize", "not requested; add --localize"))
        return RunnerReport(
            runner=runner.name,
            precision=runner.precision,
            provenance=runner.provenance(),
            checks=tuple(checks),
            points=self._decisions.points(),
        )

    def _judged_decisions(self, limit: Limit) -> Check:
        if not self._bundle.manifest.has_logits:
            return skipped_check("decisions", _NO_LOGITS)
        if self._quantized:
            why = (
                self._why
                or ("the graph was calibrated on these images" if self._options.data is not None else "")
                or "quantisation changes decisions, and only real images show how many; add --data"
            )
            return self._decisions.kept(self._options.keep_decisions or KEPT, broken=self._broken, skipped=why)
        return self._decisions.check(limit)

    def _judged_accuracy(self) -> Check:
        if self._reference is None:
            return skipped_check("accuracy", f"needs PyTorch's logits of further images: {self._why}")
        if not self._bundle.manifest.has_logits:
            return skipped_check("accuracy", _NO_LOGITS)
        if self.accuracy is None:
            check = skipped_check("accuracy", "no labelled images were given; add --data")
        else:
            check = self.accuracy.check(gate_of(self._runner.precision, self._options.gate))
            check = without_calibration_images(check, self._left_out)
        return accuracy_of_resized(check, self._bundle.manifest.spec)

    def _checked_calibration(self, samples: Sequence[Sample], on_progress: OnProgress) -> Check:
        precision = self._runner.precision
        if precision not in QUANTIZED:
            return skipped_check("calibration", f"{precision} needs no calibration")
        if is_dynamic(self._bundle, precision):
            why = "no calibration needed: the activations are quantised while the network runs"
            return skipped_check("calibration", why)
        if self._reference is None:
            return skipped_check("calibration", _needs_model(self._why))
        if not samples:
            return skipped_check("calibration", "no images were given to compare the calibration with; add --data")
        on_progress(Progress("calibration"))
        inputs = self._bundle.inputs_from_pixels(np.stack([sample.pixels for sample in samples]))
        new = self._new(inputs)
        if not new.any():
            why = "the graph was calibrated on these images, so they cannot judge its ranges; add others to --data"
            return Check(name="calibration", verdict="undecided", summary=why, reasons=(why,))
        exact = np.stack([sample.exact for sample in samples])[new]
        return check_calibration(self._bundle, precision, inputs[new], exact, for_cpu=self._runner.device == "cpu")

    def _explained(self, numeric: Check, reference: Reference, kept: dict[str, Known], limit: Limit) -> Check:
        if len({rows.shape[1:] for rows in self._kept_logits}) > 1:
            return numeric
        inputs = np.concatenate([known.batch.inputs for known in kept.values()])
        guess = explain(self._bundle, reference, inputs, np.concatenate(self._kept_logits), limit.largest)
        why = f"likely cause: {guess}; with this mistake, PyTorch gives the logits of the runner"
        return replace(numeric, reasons=(*numeric.reasons, why)) if guess else numeric
