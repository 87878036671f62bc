"""Compare any number of runners with PyTorch: all parity checks in a single pass over the inputs.

A runner is a runtime, an engine or a server that computes the logits.

    constants         the masks and biases in the graph are those of the manifest, and those computed from the
                      bundle's weights
    reference         PyTorch's logits on this machine equal PyTorch's logits at export, within a tolerance
    numeric           the runner's logits are near PyTorch's float64 logits; the limit is derived from the error of
                      PyTorch's float32 logits
    decisions         on the data, the runner predicts PyTorch's class, or a class whose logit is so close in PyTorch
                      that numeric error can swap the two; for int8 and fp8, enough images of the data keep their class
    accuracy          the runner's top-1 on labelled images reaches the gate, a share of PyTorch's top-1; the check
                      compares the confidence interval of the difference with the lowest difference allowed.
                      PyTorch's top-1 reaches the expected accuracy, if one is given, and no other preprocessing gives
                      a clearly higher one. Images that calibrated the runner's graph are left out
    stages            what quantisation, the runtime and this project's kernels each change in the logits and in the
                      decisions; the dB and the least cosine reach the gates, if the user typed any
    batch invariance  the logits of an image do not depend on the other images of the batch
    calibration       a quantised graph is the trained network, quantised as its record says; it loses on the data no
                      more than on images of its calibration
    preprocessing     this package, the graph and the server turn the same images into the same tensors
    served            a server answers every request with the logits of the images in this request
    choice            the runner that ``gmmvit optimize`` chose on this kind of machine passes its checks and the gate
                      with the versions that are installed now (`parity.choice`, added by ``gmmvit parity``)
    localize          the error of each block is within the tolerance; otherwise the check names the first block with a
                      larger error

The checks ``constants``, ``reference`` and ``choice`` examine the bundle; the others examine a runner. Some checks do
not always run: ``accuracy`` needs labelled images, ``decisions`` needs images, ``calibration`` runs only for int8 and
fp8, and so does ``stages``, which is undecided without images, ``preprocessing`` needs the mean and std of the images,
``served`` runs only for Triton, and ``localize`` only with --localize. Without labelled images, ``accuracy`` is
undecided for a model that export resized to another image size.

In the pass, PyTorch computes the logits of every input once, and each runner twice: one by one, and in batches. The
checks ``numeric``, ``decisions``, ``accuracy`` and ``stages`` judge both, and the worst counts. The pass keeps
statistics of the images of the data, and no images.

The code of a model can be in a file that gmmvit runs only if the command names the file. Without the file, the golden
inputs of the bundle and the logits that PyTorch computed for them at export are the reference: ``numeric``,
``batch invariance``, ``preprocessing`` and ``served`` run on the golden inputs. The other checks need
PyTorch's logits of further inputs, and are skipped with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gmmvit_deploy.bundle.artifacts import Bundle, tool_versions
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.images.data.images import Images
from gmmvit_deploy.parity._accuracy import (
    gate_of,
)
from gmmvit_deploy.parity._constants import check_constants
from gmmvit_deploy.parity._numeric import check_stored
from gmmvit_deploy.parity._preprocessing import Sample, samples_of
from gmmvit_deploy.parity._quantised import QuantisedGraph
from gmmvit_deploy.parity._tally import Tally, needs_model
from gmmvit_deploy.parity._trained_accuracy import TrainedAccuracy
from gmmvit_deploy.parity._verdict import skipped_check
from gmmvit_deploy.parity.inputs import ImageStream, OnBroken, golden_batch, random_batch
from gmmvit_deploy.parity.reference import Known, Reference, known_batch, why_no_model
from gmmvit_deploy.parity.report import ParityReport
from gmmvit_deploy.precision import Precision
from gmmvit_deploy.progress import OnProgress, Progress, ignore
from gmmvit_deploy.reports.reporting import described_bundle
from gmmvit_deploy.runtimes.programs.cores import cores
from gmmvit_deploy.runtimes.runners.runner import Runner, judging

__all__ = ["BATCH", "ParityOptions", "check_parity"]

BATCH = max(16, 2 * cores())
"""The number of images in the batches that are judged beside single images, as `gmmvit optimize` times them. With fewer
than two images a core, all cores share each image, as they share a single one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityOptions:
    """Options of a parity run.

    data: the real images; None checks without real images.
    limit: the number of images to use, spread evenly over the data; None uses all images.
    on_broken: ``fail`` ends the run at a broken image; ``skip`` leaves broken images out.
    keep_decisions: the share of the images whose decision a runner must keep; None uses the precision's gate.
    snr_db: the least signal-to-noise ratio of a runner's logits; None sets no gate.
    least_cosine: the least cosine of an image's features, or of its logits if the bundle has no features beside them;
    not centred. None sets no gate.
    gate: the share of PyTorch's top-1 that the runner must reach; None uses MLPerf's gate for the runner's precision.
    expected_accuracy: the accuracy that training measured on such images, which PyTorch must reach; None if unknown.
    other_preprocessings: False does not look for a preprocessing with which PyTorch is more accurate.
    localize: True also measures the error of each block.
    batch: each runner computes all inputs one by one, or in the smallest batches that it takes, and in batches of this
    size. The worst result of a check counts.
    """

    data: Images | None = None
    limit: int | None = None
    on_broken: OnBroken = "fail"
    gate: float | None = None
    keep_decisions: float | None = None
    snr_db: float | None = None
    least_cosine: float | None = None
    expected_accuracy: float | None = None
    other_preprocessings: bool = True
    localize: bool = False
    batch: int = BATCH

    def __post_init__(self) -> None:
        gate_of("fp32", self.gate)
        for option, share in (("keep-decisions", self.keep_decisions), ("expect-accuracy", self.expected_accuracy)):
            # No number of images shows that all keep their decision.
            if share is not None and not (0 < share < 1 or (share == 1 and option == "expect-accuracy")):
                raise InputError(f"--{option}: expected a share of the images, such as 0.97, got {share}")
        if self.snr_db is not None and not 0 < self.snr_db < 200:
            raise InputError(f"--snr-db: expected dB, such as 20, got {self.snr_db}")
        if self.least_cosine is not None and not 0 < self.least_cosine < 1:
            raise InputError(f"--least-cosine: expected a cosine, such as 0.98, got {self.least_cosine}")
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
    runners: opened from this bundle, or from a copy of it with other variants.
    skipped: runners that were left out, each with the reason, for the report.
    A difference between a runner and PyTorch that exceeds a limit raises no error: the report's verdict is ``failed``.
    Errors: InputError when the data does not fit the bundle.
    ImageError on a broken image, unless ``on_broken`` is ``skip``.
    Every error that a runner raises.
    """
    if not runners:
        raise InputError("expected at least one runner, got an empty list")
    with judging(runners):
        return _report(bundle, runners, options or ParityOptions(), skipped, on_progress)


def _report(
    bundle: Bundle,
    runners: Sequence[Runner],
    options: ParityOptions,
    skipped: Sequence[str],
    on_progress: OnProgress,
) -> ParityReport:
    why = why_no_model(bundle)
    reference = None if why else Reference(bundle)
    graphs: dict[tuple[Path, Precision, bool], QuantisedGraph] = {}
    tallies = [Tally(runner, options, reference, why, graphs) for runner in runners]
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
            batch=min(options.batch, bundle.manifest.max_batch),
            limit=options.limit,
            on_broken=options.on_broken,
        )
        for batch in stream:
            known = known_batch(reference, batch)
            trained.add(batch.labels, known.trained)
            on_progress(Progress(stream.images.name, stream.done, stream.count))
            for tally in tallies:
                tally.add(f"data: {stream.images.name}", known)
        samples = samples_of(bundle, reference, stream)
        if options.other_preprocessings:
            trained.try_others(reference, stream, on_progress)
    checked: dict[Path, list[str]] = {}
    reports = [tally.report(kept, samples, trained, checked, on_progress) for tally in tallies]
    of_bundle = (
        tuple(skipped_check(name, needs_model(why)) for name in ("constants", "reference"))
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
