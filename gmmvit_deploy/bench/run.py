"""Run a whole benchmark of a bundle: latency, throughput, roofline, waterfall and load of several runners."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.bench.cells import Plan, measure
from gmmvit_deploy.bench.machine import describe_machine, machine_state
from gmmvit_deploy.bench.outputs import Expected, stored_inputs
from gmmvit_deploy.bench.report import BenchReport
from gmmvit_deploy.bench.roofline import measured_rooflines, network_work
from gmmvit_deploy.bench.served_load import search_rate
from gmmvit_deploy.bench.waterfall import waterfall
from gmmvit_deploy.bundle.artifacts import Bundle, tool_versions
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.exporting.golden import fresh_inputs
from gmmvit_deploy.extras import require
from gmmvit_deploy.files.writing import sha256_of_bytes
from gmmvit_deploy.images.data.images import Images
from gmmvit_deploy.models.families import family_of
from gmmvit_deploy.parity.inputs import ImageStream
from gmmvit_deploy.progress import OnProgress, Progress, ignore
from gmmvit_deploy.reports.reporting import described_bundle
from gmmvit_deploy.runtimes.runners.runner import Device, Runner, judging


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """Options of a benchmark.

    data: real images; with None, random inputs are generated, and the run card says so.
    samples: the number of different inputs, all kept in memory.
    bound_ms: the largest p99 latency, for the search of the highest arrival rate; None leaves it out.
    """

    plan: Plan = field(default_factory=Plan)
    data: Images | None = None
    samples: int = 256
    bound_ms: float | None = None
    roofline: bool = True

    def __post_init__(self) -> None:
        plan = self.plan
        if not plan.batches or min(plan.batches) < 1 or len(set(plan.batches)) < len(plan.batches):
            raise InputError(f"batches {list(plan.batches)}: expected distinct sizes of at least 1")
        if plan.rounds < 3:
            raise InputError(f"rounds is {plan.rounds}; expected at least 3, to measure a spread")
        if not plan.seconds > 0:
            raise InputError(f"seconds is {plan.seconds:g}; expected more than 0")
        if self.samples < max(plan.batches):
            raise InputError(f"samples is {self.samples}; expected at least the largest batch, {max(plan.batches)}")
        if self.bound_ms is not None and not self.bound_ms > 0:
            raise InputError(f"the latency bound is {self.bound_ms:g} ms; expected more than 0")


def bench(
    bundle: Bundle,
    runners: Sequence[Runner],
    options: BenchOptions | None = None,
    *,
    on_progress: OnProgress = ignore,
) -> BenchReport:
    """Measure every runner.  Ratios are relative to the first runner.

    Wrong answers or a busy machine raise no error, but the report is then INVALID.
    Errors: InputError when options or data do not fit; MissingDependencyError without LoadGen; errors of a runner.
    """
    if not runners:
        raise InputError("no runner was named, expected at least 1")
    options = options or BenchOptions()
    require("mlperf_loadgen", package="mlcommons-loadgen", extra="bench")
    _require_batches(runners, options.plan)
    with judging(runners):  # every answer is compared, and a wrong one is reported
        return _measured(bundle, runners, options, on_progress)


def _measured(bundle: Bundle, runners: Sequence[Runner], options: BenchOptions, on_progress: OnProgress) -> BenchReport:
    inputs, pixels, data = _inputs(bundle, options)
    on_progress(Progress("reference logits by PyTorch"))
    expected = Expected(bundle, inputs)
    taken = [batch for batch in options.plan.batches if any(runner.takes(batch) for runner in runners)]
    works = [network_work(bundle, batch) for batch in taken]
    kinds = dict.fromkeys((runner.precision, runner.device) for runner in runners)
    targets = kinds if options.roofline else {}
    before = machine_state()
    lines = measured_rooflines(works, targets, on_progress=on_progress)
    cells = measure(runners, inputs, expected, options.plan, on_progress=on_progress)
    steps = waterfall(bundle, runners, inputs, pixels)
    loads = []
    if options.bound_ms is not None:
        for runner in runners:
            rates = [cell.samples_per_second for cell in cells if cell.runner == runner.label]
            bound = {"bound_ms": options.bound_ms, "max_rate": max(rates)}
            loads.append(search_rate(runner, inputs, expected, **bound, on_progress=on_progress))
    lines = measured_rooflines(works, targets, seen=lines, on_progress=on_progress)
    return BenchReport(
        bundle=described_bundle(bundle),
        data=data,
        settings={
            "batches": list(options.plan.batches),
            "rounds": options.plan.rounds,
            "seconds": options.plan.seconds,
            "bound_ms": options.bound_ms,
        },
        machine=describe_machine(),
        versions=tool_versions("openvino", "mlcommons-loadgen", "tritonclient"),
        runners={runner.label: runner.provenance() for runner in runners},
        before=before,
        after=machine_state(),
        cells=tuple(cells),
        works=tuple(works),
        rooflines=tuple(lines.values()),
        steps=tuple(steps),
        loads=tuple(loads),
        skipped=tuple(_skipped(runners, options, [kind for kind in kinds if kind not in lines])),
    )


def _skipped(
    runners: Sequence[Runner], options: BenchOptions, without_roofline: Sequence[tuple[str, Device]]
) -> Iterator[str]:
    for runner in runners:
        for batch in options.plan.batches:
            if not runner.takes(batch):
                yield f"{runner.label}: batch {batch}: the runner takes {_batches(runner)}"
    if options.bound_ms is None:
        yield "random arrivals: no latency bound was given (--bound-ms)"
    if not options.roofline:
        yield "roofline: not requested"
        return
    for precision, device in without_roofline:
        yield f"roofline in {precision} on the {device}: no supported library multiplies in this precision here"


def _require_batches(runners: Sequence[Runner], plan: Plan) -> None:
    for runner in runners:
        if not any(runner.takes(batch) for batch in plan.batches):
            raise InputError(
                f"runner {runner.label} cannot take any of the batches {', '.join(map(str, plan.batches))}",
                hint=f"give batch sizes that the runner takes: {_batches(runner)}",
            )


def _batches(runner: Runner) -> str:
    return ", ".join(f"{low} to {high}" for low, high in runner.ranges)


def _inputs(bundle: Bundle, options: BenchOptions) -> tuple[NDArray[Any], NDArray[Any] | None, dict[str, Any]]:
    """Return (inputs of the graph, the same images as pixels or None, description for the run card).

    Without a model, only PyTorch's logits of the golden inputs are known.
    """
    why, images = family_of(bundle.manifest.spec).unavailable(bundle.manifest.spec), options.data
    if images is None:
        if why:
            inputs, name = stored_inputs(bundle, options.samples)[0], f"reference inputs of the bundle, repeated: {why}"
        else:
            inputs, name = fresh_inputs(bundle, options.samples), "synthetic: patches of colour with noise"
        sha256 = sha256_of_bytes(inputs.tobytes())
        pixels = inputs if bundle.manifest.input_kind == "pixels" else None
        return inputs, pixels, {"name": name, "samples": len(inputs), "sha256": sha256}
    if why:
        raise InputError(
            f"{images.name}: PyTorch's logits of these images are not known: {why}",
            hint="add --model FILE.py:CLASS, or type --synthetic to measure on the reference inputs of the bundle",
        )
    stream = ImageStream(bundle=bundle, images=images, batch=options.samples, limit=options.samples)
    inputs = np.concatenate([batch.inputs for batch in stream])
    if len(inputs) < max(options.plan.batches):
        raise InputError(
            f"{images.name} has {len(inputs)} distinct images; expected at least the largest batch, "
            f"{max(options.plan.batches)}"
        )
    pixels = np.stack([images.pixels(index, bundle.manifest.image) for index in stream.taken])
    return inputs, pixels, {"name": images.name, "samples": len(inputs), "sha256": stream.sha256}
