"""Time the float32 programs that export proved, and record the fastest for this kind of machine."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from gmmvit_deploy.bundle.choices import Candidate, Choice, write_choice
from gmmvit_deploy.bundle.variants import open_variant
from gmmvit_deploy.graphs.weights import files_of
from gmmvit_deploy.inference.runner_name import RunnerName
from gmmvit_deploy.measure.statistics import ratio
from gmmvit_deploy.measure.turns import seconds_in_turn
from gmmvit_deploy.progress import OnProgress, Progress, ignore
from gmmvit_deploy.runtimes.runners.chosen import runtime_versions, this_machine
from gmmvit_deploy.runtimes.runners.names import ON_CPUS
from gmmvit_deploy.runtimes.runners.open import proof_programs

if TYPE_CHECKING:
    from gmmvit_deploy.bundle.artifacts import Bundle

_ROUNDS = 8
_TURN_S = 0.005
"""Min seconds of each half of a turn: export must not take much longer because of this."""
_MAX_BYTES = 512 * 2**20
"""The largest graph that is timed: all programs are open at once, each with copies of the weights."""


def record_fastest(bundle: Bundle, *, on_progress: OnProgress = ignore) -> Choice | None:
    """Time the float32 programs on one image, and write them into the bundle's ``runners.json``, the fastest first.

    The programs run in turn. Returns the entry, or None without one: if a single program can run here, or if the graph
    is too large to be open in all programs.
    Errors: OutputError when the file cannot be written.
    """
    proven = bundle.manifest.export_parity
    names = [name for name in reversed(ON_CPUS) if f"{name}_largest_abs" in proven]
    graph = open_variant(bundle, "fp32")
    if len(names) < 2 or sum(file.stat().st_size for file in files_of(graph.path)) > _MAX_BYTES:
        return None
    on_progress(Progress("time the runtimes"))
    programs = proof_programs(bundle, graph)
    image = bundle.golden_rows()[0][:1]
    with ExitStack() as stack:
        runners = [stack.enter_context(programs[name]()) for name in names]
        runs = [partial(runner.run, image) for runner in runners]
        seconds = np.array(seconds_in_turn(runs, rounds=_ROUNDS, turn_s=_TURN_S))
    choice = Choice(
        machine=this_machine(),
        goal="latency",
        batch=1,
        base=RunnerName.parse(names[0]),
        candidates=tuple(
            Candidate(
                runner=RunnerName.parse(names[number]),
                graph_sha256=graph.sha256,
                passed=True,
                speed=ratio(seconds[0], seconds[number]),
            )
            for number in np.argsort(np.median(seconds, axis=1))
        ),
        versions=runtime_versions(),
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    write_choice(bundle.path, choice)
    return choice
