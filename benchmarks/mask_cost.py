"""Is a mask free?  Every family with its GMM over its plain twin, in each runtime of a CPU.

The five models of the paper as its released code names them (32×32, 10 classes, GMM with K = 5 a head), random
weights, and their plain twins: the same weights, no mask. One runner and one batch at a time, both models are loaded
and timed in turn, a model and its twin one right after the other; then both are loaded anew, in another order, as often
as --loads says: by where its weights come to lie in memory one and the same program is some percent faster or slower,
and that is more than the mask takes. A load's ratio is that of its two medians; the result is the median of the loads'
ratios, with a bootstrap interval over the loads.

Answers of every program of every load are held to the limits of parity (`gmmvit_deploy/tolerances.py`); a wrong one
stops the script.

    python benchmarks/mask_cost.py [--loads 12] [--output benchmarks/results/mask_cost.json]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import run_card
from core_to_core import round_trip_ns
from cpu_programs import RUNNERS, cpu_program
from families import FAMILIES
from interleaved import in_words, ratio, time_rounds
from side_by_side import BATCHES, Family, checked

_ROUNDS = {1: 4, 64: 2}
"""Turns of both, a load: of 32 single images or of one batch of 64. What one load differs from the next is more."""


def measured(family: Family, runner: str, batch: int, loads: int, generator: np.random.Generator) -> dict[str, Any]:
    """over_plain: the ratio and its interval.  off, limit: of the worst of all answers."""
    precision = RUNNERS[runner]
    twins = {runner: "gmm", f"{runner} plain": "plain"}
    medians: dict[str, list[float]] = {name: [] for name in twins}
    worst = {"off": 0.0, "limit": 0.0}
    apart = round_trip_ns()
    for _ in range(loads):
        family.programs.clear()
        for name in generator.permutation(list(twins)):
            family.add(str(name), [cpu_program(family.saved(twins[name]), runner, precision)], precision)
        times, logits, images = time_rounds(family.programs, batch, _ROUNDS[batch], warm_up_rounds=1)
        worst = max(worst, *checked(family, logits, images).values(), key=lambda found: found["off"])
        for name, values in times.items():
            medians[name].append(float(np.median(values)))
    with_mask, without = (np.asarray(medians[name]) for name in twins)
    return {
        "median_ms": float(np.median(with_mask)),
        "over_plain": ratio(with_mask, without),
        "core_to_core_ns": [apart, round_trip_ns()],
        **worst,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", type=int, default=12)
    parser.add_argument("--family", choices=FAMILIES, action="append", help="only this one; may be repeated")
    parser.add_argument("--batch", type=int, choices=BATCHES, action="append", help="only this one")
    result = Path(__file__).parent / "results" / "mask_cost.json"
    parser.add_argument("--output", type=Path, default=result)
    arguments = parser.parse_args()
    generator = np.random.default_rng(0)
    with run_card.written(arguments.output, Path(__file__).name, loads=arguments.loads) as results:
        results["families"] = {}
        for name in arguments.family or FAMILIES:
            with tempfile.TemporaryDirectory() as folder:
                family = Family(name, Path(folder), ("gmm", "plain"), "cpu")
                rows = results["families"][name] = {}
                for batch in arguments.batch or BATCHES:
                    rows[str(batch)] = {}
                    for runner in RUNNERS:
                        row = measured(family, runner, batch, arguments.loads, generator)
                        rows[str(batch)][runner] = row
                        print(f"{name}, batch {batch}, {runner}: {in_words(row['over_plain'])} of plain", flush=True)


if __name__ == "__main__":
    main()
