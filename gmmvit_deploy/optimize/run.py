"""Choose the runner and the precision of a bundle on this machine, and write the choice with its evidence.

1. Convert what the bundle lacks.
2. Look how fast each program is, in turn; a program that is slower than the fastest in float32 cannot win.
3. Hold the others to the checks of parity on some images, and but for float32 to the gate on all, one by one and in
   batches: those of float32, then graph by graph, the fastest first. What is slower than a program that passed, and
   needs as much to run, is left out. The fastest of those that fail are then tried as the first of a cascade.
4. Time those that pass in turn, for longer; a cascade, whose time depends on the images, on those that judge. A program
   in another precision is chosen only if the whole interval of its speed lies above that of float32.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np

from gmmvit_deploy.bundle.artifacts import Bundle, open_bundle
from gmmvit_deploy.bundle.choices import Choice, JudgedImages, write_choice
from gmmvit_deploy.bundle.gates import Gate
from gmmvit_deploy.errors import BundleError, InputError, OutputError
from gmmvit_deploy.inference.answer_counts import sureness
from gmmvit_deploy.inference.precision import SPECS
from gmmvit_deploy.neighbours import KEEP_NEIGHBOURS
from gmmvit_deploy.optimize._programs import (
    convert_merged,
    convert_missing,
    opened_cascades,
    opened_programs,
    refuse_overlap,
)
from gmmvit_deploy.optimize._race import Race
from gmmvit_deploy.optimize.options import OptimizeOptions
from gmmvit_deploy.parity.check import check_parity
from gmmvit_deploy.parity.inputs import ImageStream
from gmmvit_deploy.parity.judgement import accuracy_of_pytorch, judgement_of
from gmmvit_deploy.parity.options import BATCH, ParityOptions
from gmmvit_deploy.parity.reference import Reference, why_no_model
from gmmvit_deploy.parity.report import ParityReport
from gmmvit_deploy.progress import OnProgress, Progress, ignore, prefixed
from gmmvit_deploy.runtimes.runners.chosen import runtime_versions, this_machine

_NUMERIC_IMAGES = 128
"""The number of images on which all checks of parity run. A wrong graph, runtime or kernel shows on a few; only the
shares that a gate judges need hundreds."""

__all__ = ["OptimizeOptions", "optimize_bundle"]


def optimize_bundle(
    bundle: Bundle | Path | str, options: OptimizeOptions, *, on_progress: OnProgress = ignore
) -> Choice:
    """Choose the fastest program that passes, and write it with all others into the bundle's ``runners.json``.

    Example: ``optimize_bundle("bundle", OptimizeOptions(data="folder:val"))``.

    What is converted stays in the bundle, as by `variants_from_bundle`.
    A bundle without logits is judged by the neighbours that its features keep, of all precisions but float32.
    Errors: InputError when this process cannot build the model, when the batch is larger
    than the bundle's, when images of the calibration also judge, when the labels cannot judge an accuracy, or when no
    float32 program passes.
    BundleError when the bundle itself fails a check.  OutputError when the bundle's folder cannot be written.
    Every error of `check_parity` and `write_choice`.
    """
    bundle = open_bundle(bundle)
    batch = options.batch or min(1 if options.goal == "latency" else BATCH, bundle.manifest.max_batch)
    _require(bundle, batch)
    judged = batch if batch > 1 else min(BATCH, bundle.manifest.max_batch)  # beside single images
    stream = ImageStream(bundle=bundle, images=options.images, batch=judged, limit=options.limit)
    gate = _gate(options, stream)
    reference = Reference(bundle, remembers=True)
    trained = None
    if gate.accuracy is not None:
        on_progress(Progress("compare the labels with PyTorch's answers"))
        trained = _accuracy_of_pytorch(options, judged, reference)
    if options.calibration is not None:
        on_progress(Progress("compare the calibration images with those that judge"))
        refuse_overlap(bundle, options.calibration, stream)
    with ExitStack() as stack:
        of_mixed = gate if gate.keep_neighbours else Gate(keep_decisions=gate.keep_decisions or SPECS["int8"].kept_gate)
        why_not = convert_missing(bundle, options.calibration, on_progress, gate=of_mixed)
        opened, left_out = opened_programs(bundle, why_not, stack, on_progress)
        race = Race(opened, left_out)
        inputs = np.resize(bundle.golden_rows()[0], (judged, *bundle.input_shape))
        race.look(inputs[:batch], inputs, on_progress=prefixed("look how fast each program is", on_progress))
        judge = partial(_judge, race, reference, options, gate, judged, prefixed("check", on_progress))
        report, *_ = judge()
        if bundle.manifest.has_logits and race.firsts:  # features have no margin that could defer an image
            if any(first.precision == "int8" for first in race.firsts):
                why_not = convert_merged(bundle, options.calibration, on_progress)
                merged, left_out = opened_programs(bundle, why_not, stack, on_progress, merged=True)
                race.join(merged, left_out, on_progress=prefixed("look at merged tokens", on_progress))
                opened |= merged
                judge()
            # Without a share that the user states, int8's own gate would ask less of a cascade than it can give.
            stated = gate.keep_decisions if options.keep_decisions or options.gate else None
            race.add(
                *opened_cascades(bundle, race.firsts, opened, options.calibration, on_progress, keep_decisions=stated)
            )
            judge()
        images = ImageStream(bundle=bundle, images=options.images, batch=batch, limit=stream.count)
        race.measure(images, on_progress=prefixed("time those that pass in turn", on_progress))
        data = report.data or {}
    choice = Choice(
        machine=this_machine(),
        goal=options.goal,
        batch=batch,
        candidates=race.candidates(),
        versions=runtime_versions(),
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        gate=gate,
        images=JudgedImages(
            source=options.source,
            count=data["images"],
            checked=min(data["images"], judged * -(-_NUMERIC_IMAGES // judged)),
            sha256=data["sha256"],
            accuracy=trained,
            copies=data["copies"],
            batches=tuple(sorted({1, judged})),
            answers=sureness(report.answers),
        ),
        base=race.base,
    )
    write_choice(bundle.path, choice)
    return choice


def _judge(
    race: Race, reference: Reference, options: OptimizeOptions, gate: Gate, batch: int, on_progress: OnProgress
) -> list[ParityReport]:
    """Judge programs until none is left that could win, and return the reports, each on the same images."""
    reports = []
    checks = ParityOptions(
        data=options.images,
        limit=options.limit,
        gate=gate.accuracy,
        keep_decisions=gate.keep_decisions,
        keep_neighbours=gate.keep_neighbours,
        other_preprocessings=False,  # no program's answers depend on it
        numeric_images=_NUMERIC_IMAGES,
        batch=batch,
    )
    while runners := race.next_to_judge():
        report = check_parity(
            reference.bundle, list(runners.values()), checks, reference=reference, on_progress=on_progress
        )
        for check in report.checks:
            if check.verdict == "failed":
                raise BundleError(f"{reference.bundle.path}: {check.name}: {check.reasons[0]}")
        judgements = [judgement_of(of_runner, gate) for of_runner in report.runners]
        race.judge(dict(zip(runners, judgements, strict=True)))
        reports.append(report)
    return reports


def _require(bundle: Bundle, batch: int) -> None:
    if not os.access(bundle.path, os.W_OK):
        raise OutputError(f"{bundle.path}: the choice cannot be written: no right to write into the bundle")
    if why := why_no_model(bundle):
        raise InputError(f"{bundle.path}: {why}", hint="add --model FILE.py:CLASS")
    if batch > bundle.manifest.max_batch:
        raise InputError(
            f"batch: expected at most {bundle.manifest.max_batch}, the largest batch of {bundle.path}, got {batch}",
            hint="type a smaller --batch, or export the checkpoint again with a larger --max-batch",
        )


def _accuracy_of_pytorch(options: OptimizeOptions, batch: int, reference: Reference) -> float | None:
    stream = ImageStream(bundle=reference.bundle, images=options.images, batch=batch, limit=options.limit)
    accuracy, why = accuracy_of_pytorch(stream, reference)
    if why:
        raise InputError(
            f"data {options.source}: {why}",
            hint="correct the labels of the bundle or of the data; if those of the bundle are right, --keep-decisions "
            f"{SPECS['int8'].kept_gate:g} judges without labels",
        )
    return accuracy


def _gate(options: OptimizeOptions, stream: ImageStream) -> Gate:
    if not stream.bundle.manifest.has_logits:
        if options.keep_decisions is not None:
            raise InputError(
                f"{stream.bundle.path}: the bundle has features and no logits, so it decides nothing",
                hint="type --gate with the share of the nearest neighbours to keep",
            )
        return Gate(keep_neighbours=options.gate or KEEP_NEIGHBOURS)
    if options.keep_decisions is not None:
        return Gate(keep_decisions=options.keep_decisions)
    if any(options.images.label(int(index)) is not None for index in stream.indices()):
        return Gate(accuracy=options.gate or SPECS["int8"].accuracy_gate)
    return Gate(keep_decisions=options.gate or SPECS["int8"].kept_gate)
