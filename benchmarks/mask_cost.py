"""How much time does a mask cost? Each family with GMM compared with its plain model, in each CPU runner.

The models are the paper's five models (32×32, 10 classes, GMM with K = 5 a head, random weights) and the systems of
`benchmarks/shared/systems.py` that have a plain twin: with LSA, the twin has neither learned temperatures nor a masked
diagonal, and that of RMT no decay. A plain model has the same weights.

For each runner and batch, both models run in short turns, one right after the other, and are loaded again --loads
times, because the place of the weights in memory changes the speed by more than the mask costs. The result is the
median of the loads' ratios, with its interval over the loads. Wrong logits (limits of parity) stop the script.

    python benchmarks/mask_cost.py [--loads 6] [--family vit] [--check] [--output FOLDER]
"""

from __future__ import annotations

import tempfile
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shared import run_card
from benchmarks.shared.cpu_programs import RUNNERS, cpu_program
from benchmarks.shared.interleaved import Program
from benchmarks.shared.options import parsed, script_parser
from benchmarks.shared.results import interval
from benchmarks.shared.side_by_side import BATCHES, Family, check_logits, checked
from benchmarks.shared.systems import MEASURED, SYSTEMS
from gmmvit_deploy.measure.statistics import ratio
from gmmvit_deploy.measure.turns import seconds_in_turn

MODELS = tuple(name for name in MEASURED if name not in SYSTEMS or SYSTEMS[name].plain is not None)
"""The names of the models that have a plain twin."""
_TURNS = {1: 40, 64: 6}
"""Batch → number of turns of each model in a load."""
_TURN_S = 0.01
"""The minimum seconds of each half of a turn."""


def loaded_twins(family: Family, runner: str, generator: np.random.Generator) -> tuple[Program, Program]:
    """Load the model and its plain twin in random order, as the only programs of the family, and return both."""
    precision, twins = RUNNERS[runner], {runner: "trained", f"{runner} plain": "plain"}
    family.programs.clear()
    for name in map(str, generator.permutation(list(twins))):
        family.add(name, [cpu_program(family.saved(twins[name]), runner, precision)], precision)
    masked, plain = (family.programs[name][0] for name in twins)
    return masked, plain


def measured(family: Family, runner: str, batch: int, loads: int, generator: np.random.Generator) -> dict[str, Any]:
    """Return the row of a runner and batch; over_plain is the time with a mask / the time of the plain model."""
    images = generator.standard_normal((batch, *family.image_shape), dtype=np.float32)
    loaded: list[float] = []
    medians: list[float] = []
    worst = {"off": 0.0, "limit": 0.0}
    for _ in range(loads):
        masked, plain = loaded_twins(family, runner, generator)
        runs = [partial(program, images) for program in (masked, plain)]
        seconds = seconds_in_turn(runs, rounds=_TURNS[batch], turn_s=_TURN_S)
        distances = checked(family, {runner: masked(images), f"{runner} plain": plain(images)}, images)
        worst = max(worst, *distances.values(), key=lambda answers: answers["off"])
        loaded.append(ratio(*seconds).value)
        medians.append(1e3 * float(np.median(seconds[0])))
    return {
        "median_ms": float(np.median(medians)),
        "over_plain": ratio(loaded, np.ones(loads)),
        "loads": loaded,
        **worst,
    }


def main() -> None:
    parser = script_parser(__doc__, __file__, suffix="")
    parser.add_argument("--loads", type=int, default=6)
    parser.add_argument("--family", choices=MODELS, action="append", help="only this model; may be repeated")
    parser.add_argument("--batch", type=int, choices=BATCHES, action="append", help="only this batch; may be repeated")
    parser.add_argument("--runner", choices=RUNNERS, action="append", help="only this runner; may be repeated")
    arguments = parsed(
        parser,
        check="check the logits of every program, and time nothing",
        family=["vit"],
        batch=[1],
        runner=["openvino+kernels"],
    )
    generator = np.random.default_rng(0)
    cells = list(product(arguments.batch or BATCHES, arguments.runner or RUNNERS))
    for name in arguments.family or MODELS:  # models are not compared, so each has its own run card
        output = arguments.output / f"{name}.json"
        with tempfile.TemporaryDirectory() as folder:
            if arguments.check:
                family = Family(name, Path(folder), ("trained", "plain"), "cpu")
                for batch, runner in cells:
                    loaded_twins(family, runner, generator)
                    check_logits(family, batch)
                continue
            with run_card.written(output, Path(__file__).name, loads=arguments.loads) as results:
                family = Family(name, Path(folder), ("trained", "plain"), "cpu")
                if name in SYSTEMS:
                    results["size"] = SYSTEMS[name].size
                for batch, runner in cells:
                    row = measured(family, runner, batch, arguments.loads, generator)
                    results.setdefault(str(batch), {})[runner] = row
                    cost = interval(row["over_plain"], 3)
                    print(f"{name}, batch {batch}, {runner}: with mask / plain {cost}", flush=True)


if __name__ == "__main__":
    main()
