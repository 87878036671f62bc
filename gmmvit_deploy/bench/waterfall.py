"""Measure the time of a single image in each runner: PyTorch, exported graph, engine, server over gRPC and over HTTP,
and a server that also decodes the image (the waterfall).

All get the same images. Runners are alternatives; the parts of a server's request add up. A server's statistics divide
the time of a request into queue and backend; the rest, such as the transport, is ``unexplained``, as is all of it
behind a gateway without statistics.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.errors import NotOfferedError
from gmmvit_deploy.images.spec import image_from_pixels
from gmmvit_deploy.measure.load import Program, Work, drive
from gmmvit_deploy.measure.turns import settle
from gmmvit_deploy.runtimes.programs.triton import ServerTimings
from gmmvit_deploy.runtimes.runners.names import RUNNERS
from gmmvit_deploy.runtimes.runners.runner import Runner, Served

_ROUNDS = 5
_QUERIES = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of the waterfall.

    ms: the median time of a request.
    parts: part → mean ms in a server, and ``unexplained``; empty for a runner in this process.
    """

    name: str
    ms: float
    parts: dict[str, float]


def waterfall(
    bundle: Bundle, runners: Sequence[Runner], inputs: NDArray[Any], pixels: NDArray[Any] | None
) -> list[Step]:
    """Measure every step with a single image per query.  The steps take turns in each round.

    pixels: the inputs as (N, height, width, channels), for the server that decodes; None leaves it out.
    """
    ordered = sorted(runners, key=lambda runner: (RUNNERS.index(runner.name), runner.precision))
    programs = {runner.label: _Program(runner, runner.run, inputs) for runner in ordered}
    served = next(((runner, runner.server) for runner in ordered if runner.server is not None), None)
    if served is not None and pixels is not None and bundle.manifest.image.normalisation is not None:
        runner, server = served
        encoded = np.array([[_png(image)] for image in pixels], dtype=np.object_)
        models = (server.preprocess, server.network)
        programs[f"{runner.label} + decoding"] = _Program(runner, server.infer, encoded, models)
    for number in range(_ROUNDS):
        for program in programs.values():
            program.turn(number)
    steps: list[Step] = []
    for name, program in programs.items():
        ms, parts = program.medians()
        steps.append(Step(name=name, ms=ms, parts=parts))
    return steps


def timings_of(server: Served, models: Sequence[str]) -> list[ServerTimings]:
    """Read the server's timings of these models; an empty list if the server does not offer its statistics."""
    try:
        return [server.connection.timings(model) for model in models]
    except NotOfferedError:
        return []


def server_parts(
    models: Sequence[str], before: Sequence[ServerTimings], after: Sequence[ServerTimings]
) -> dict[str, float]:
    """Return ``MODEL queue``, ``input``, ``infer`` and ``output`` → mean ms between two readings of the statistics."""
    parts: dict[str, float] = {}
    if not before:
        return parts
    for model, earlier, later in zip(models, before, after, strict=True):
        spent = later.since(earlier)
        for part, total_ns in spent.parts_ns.items():
            parts[f"{model} {part.removeprefix('compute_')}"] = total_ns / max(spent.requests, 1) / 1e6
    return parts


class _Program:
    def __init__(
        self, runner: Runner, run: Program, inputs: NDArray[Any], models: tuple[str, ...] | None = None
    ) -> None:
        self._run, self._inputs, self._in_thread = run, inputs, runner.needs_own_thread
        self._server = runner.server
        self._models = models or ((runner.server.network,) if runner.server is not None else ())
        self._rounds: list[float] = []
        self._means: list[float] = []
        self._parts: list[dict[str, float]] = []

    def turn(self, number: int) -> None:
        settle(partial(self._run, self._inputs[:1]))
        before = self._timings()
        work = Work(
            scenario="SingleStream",
            inputs=self._inputs,
            queries=_QUERIES,
            seed=number + 1,
            in_thread=self._in_thread,
        )
        latencies_ms = drive(self._run, work).latencies_ms
        self._rounds.append(float(np.median(latencies_ms)))
        self._means.append(float(np.mean(latencies_ms)))
        self._parts.append(server_parts(self._models, before, self._timings()))

    def medians(self) -> tuple[float, dict[str, float]]:
        median = float(np.median(self._rounds))
        if not self._models:
            return median, {}
        parts = {name: float(np.median([request[name] for request in self._parts])) for name in self._parts[0]}
        parts["unexplained"] = max(0.0, float(np.median(self._means)) - sum(parts.values()))
        return median, parts

    def _timings(self) -> list[ServerTimings]:
        return timings_of(self._server, self._models) if self._server is not None else []


def _png(pixels: NDArray[Any]) -> bytes:
    file = io.BytesIO()
    image_from_pixels(pixels).save(file, "PNG")
    return file.getvalue()
