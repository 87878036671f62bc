"""Compare any number of runners with PyTorch: all parity checks in a single pass over the inputs.

A runner is a runtime, an engine or a server that computes the logits.

    constants         the masks and biases in the graph are those of the manifest and of the bundle's weights
    reference         PyTorch's logits on this machine are those at export
    numeric           the runner's logits are near PyTorch's float64 logits
    decisions         on the data, the runner predicts PyTorch's class, or enough images keep their class
    neighbours        by the features, the runner finds the images near to an image that PyTorch finds
    accuracy          the runner's accuracy on labelled images reaches a share of PyTorch's (`_accuracy`), and PyTorch's
                      is what the user expects (`_trained_accuracy`)
    stages            what quantisation, the runtime and this project's kernels each change
    batch invariance  the logits of an image do not depend on the other images of the batch
    deferral          a cascade computes the images again whose margin is below its threshold
    calibration       a quantised graph is the trained network, quantised as its record says
    preprocessing     this package, the graph and the server turn the same images into the same tensors
    served            a server answers every request with the logits of the images in this request
    choice            the runner that ``gmmvit optimize`` chose still holds (`parity.choice`)
    localize          the error of each block is within the tolerance

The checks ``constants``, ``reference`` and ``choice`` examine the bundle; the others examine a runner. The module of a
check defines it. A check that does not apply is skipped, with the reason.

In the pass, PyTorch computes the logits of every input once, and each runner twice: one by one, and in batches. The
checks ``numeric``, ``decisions``, ``neighbours``, ``accuracy`` and ``stages`` judge both, and the worst counts. With
`ParityOptions.numeric_images`, not all checks judge all images. The pass keeps statistics of the images of the data, or
their features, and no images.

The code of a model can be in a file that gmmvit runs only if the command names the file. Without it, the logits that
PyTorch computed for the golden inputs at export are the reference of ``numeric``, ``batch invariance``,
``preprocessing`` and ``served``; the other checks are skipped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from gmmvit_deploy.bundle.artifacts import Bundle, open_bundle, tool_versions
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.inference.answer_counts import AnswerCounts, count_answers
from gmmvit_deploy.parity._accuracy import AccuracyCheck, accuracy_of
from gmmvit_deploy.parity._calibration import CalibrationCheck
from gmmvit_deploy.parity._constants import check_constants
from gmmvit_deploy.parity._decisions import DecisionsCheck
from gmmvit_deploy.parity._deferral import DeferralCheck
from gmmvit_deploy.parity._invariance import InvarianceCheck
from gmmvit_deploy.parity._localize import LocalizeCheck
from gmmvit_deploy.parity._neighbours import NeighboursCheck
from gmmvit_deploy.parity._numeric import NumericCheck, check_stored
from gmmvit_deploy.parity._preprocessing import PreprocessingCheck
from gmmvit_deploy.parity._runner_check import ParityRun, RunnerCheck, RunnerUnderTest
from gmmvit_deploy.parity._served import ServedCheck
from gmmvit_deploy.parity._stages import StagesCheck
from gmmvit_deploy.parity._trained_accuracy import TrainedAccuracy
from gmmvit_deploy.parity._verdict import skipped_check
from gmmvit_deploy.parity.inputs import ImageStream, golden_batch, random_batch
from gmmvit_deploy.parity.options import ParityOptions
from gmmvit_deploy.parity.reference import Known, Reference, known_batch, why_no_model
from gmmvit_deploy.parity.report import ParityReport, RunnerReport
from gmmvit_deploy.progress import OnProgress, Progress, ignore
from gmmvit_deploy.reports.reporting import described_bundle
from gmmvit_deploy.runtimes.runners.runner import Runner, judging

CHECKS: tuple[type[RunnerCheck], ...] = (
    NumericCheck,
    DecisionsCheck,
    NeighboursCheck,
    AccuracyCheck,
    StagesCheck,
    InvarianceCheck,
    DeferralCheck,
    CalibrationCheck,
    PreprocessingCheck,
    ServedCheck,
    LocalizeCheck,
)
"""The checks of a runner, in the order of the report."""


def check_parity(
    bundle: Bundle | Path | str,
    runners: Sequence[Runner],
    options: ParityOptions | None = None,
    *,
    skipped: Sequence[str] = (),
    reference: Reference | None = None,
    on_progress: OnProgress = ignore,
) -> ParityReport:
    """Run every check on every runner.  A runner that differs raises no error: the report's verdict is ``failed``.

    Example: ``check_parity(bundle, [open_runner("openvino", bundle)], ParityOptions(data="folder:val"))``.

    runners: opened from this bundle, or from a copy of it with other variants.
    skipped: runners that were left out, each with the reason, for the report.
    reference: of this bundle, for several calls with the same images; None makes one.
    Errors: InputError when the data does not fit the bundle, or this process cannot build the model; ImageError on
    a broken image, unless ``on_broken`` is ``skip``; every error that a runner raises.
    """
    if not runners:
        raise InputError("expected at least one runner, got an empty list")
    with judging(runners):
        return _checked(open_bundle(bundle), runners, options or ParityOptions(), skipped, reference, on_progress)


def _checked(
    bundle: Bundle,
    runners: Sequence[Runner],
    options: ParityOptions,
    skipped: Sequence[str],
    reference: Reference | None,
    on_progress: OnProgress,
) -> ParityReport:
    why = why_no_model(bundle)
    if why and options.images is not None:
        raise InputError(
            f"{bundle.path}: {why}, so nothing can be compared with PyTorch on images",
            hint="add --model FILE.py:CLASS, or leave --data out to compare the stored inputs",
        )
    reference = None if why else reference or Reference(bundle)
    accuracy = None if reference is None else accuracy_of(bundle, options.images)
    trained = TrainedAccuracy(options.expected_accuracy, None if accuracy is None else accuracy.right)
    run = ParityRun(options=options, reference=reference, why_no_model=why, trained=trained, on_progress=on_progress)
    tests = [RunnerUnderTest(runner, run, CHECKS) for runner in runners]
    golden, stored = golden_batch(bundle)
    for name, batch in (("golden", golden), *(() if reference is None else (("random", random_batch(bundle)),))):
        on_progress(Progress(f"{name} inputs"))
        if reference is None:
            known = Known(batch, {"stored": stored}, lambda: {"stored": stored})
        else:
            known = known_batch(reference, batch)
        run.kept[name] = known
        for tested in tests:
            tested.add(name, known, real=False)
    stream: ImageStream | None = None
    answers: AnswerCounts = Counter()
    if reference is not None and options.images is not None:
        stream = ImageStream(
            bundle=bundle,
            images=options.images,
            batch=min(options.batch, bundle.manifest.max_batch),
            limit=options.limit,
            on_broken=options.on_broken,
        )
        seen = 0
        for batch in stream:
            gate_only = options.numeric_images is not None and seen >= options.numeric_images
            seen += len(batch.inputs)
            known = known_batch(reference, batch, gate_only=gate_only)
            trained.add(batch.labels, known.trained)
            if bundle.manifest.has_logits:
                answers += count_answers(known.trained, bundle.manifest.label_set)
            on_progress(Progress(stream.images.name, stream.done, stream.count))
            for tested in tests:
                tested.add(f"data: {stream.images.name}", known, real=True)
        run.stream = stream
        if options.other_preprocessings:
            trained.try_others(reference, stream, on_progress)
    on_progress(Progress("masks and biases of the graph"))
    of_bundle = (
        tuple(skipped_check(name, run.needs_model) for name in ("constants", "reference"))
        if reference is None
        else (
            check_constants(bundle, reference),
            check_stored(stored, run.kept["golden"].trained, run.kept["golden"].exact),
        )
    )
    return ParityReport(
        bundle=described_bundle(bundle),
        versions=tool_versions(),
        data=None if stream is None else stream.described(),
        checks=of_bundle,
        runners=tuple(map(_report, tests)),
        skipped=tuple(skipped),
        answers=answers,
    )


def _report(tested: RunnerUnderTest) -> RunnerReport:
    runner = tested.runner
    tested.on_progress(Progress("judge all answers"))
    checks = tuple(check.judge() for check in tested.checks)
    tested.close()
    batch = next(check for check in checks if check.name == DecisionsCheck.name).details.get("batch", tested.batches[0])
    return RunnerReport(
        runner=runner.runner_name,
        batches=tested.batches,
        provenance=runner.provenance(),
        checks=checks,
        points=tested.check(DecisionsCheck).points(batch),
    )
