"""Time the programs of a family in the same rounds, check their logits, and report ratios and shares of a roofline.

`fastest_cpu.py` and `fastest_gpu.py` use this module with different programs.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch

from benchmarks.shared.families import FAMILIES, as_released, eager, graphs_of, pair
from benchmarks.shared.places import result_of
from gmmvit_deploy.bench import run_card
from gmmvit_deploy.bench.core_to_core import FAR
from gmmvit_deploy.bench.interleaved import Program, Timed, time_rounds
from gmmvit_deploy.bench.roofline import Roofline, measured_rooflines, work_of_graph
from gmmvit_deploy.bench.statistics import ENOUGH, ratio
from gmmvit_deploy.parity.measures import ErrorMeasure, distance
from gmmvit_deploy.runners.runner import Device
from gmmvit_deploy.runtime.emulated_precision import emulated_logits
from gmmvit_deploy.specs import input_shape
from gmmvit_deploy.tolerances import Limit, limit_from_noise

__all__ = ["BATCHES", "Family", "main"]

BATCHES = (1, 64)
_ROUNDS = {1: 4, 64: 1}  # batch → factor for the rounds; single images take less time and vary more


class Family:
    """The programs of a family, and the limits for their logits.

    models: ``gmm`` and ``plain`` → (the model, the model in float64).  graphs: the requested graphs of `graphs_of`.
    programs: name → copies of the program.  precision: name → precision of the program.
    image_shape: (channels, height, width).
    """

    def __init__(self, name: str, folder: Path, graphs: Sequence[str], device: Device) -> None:
        models = pair(name)
        self.image_shape = input_shape(models["gmm"].spec)
        self.folder = folder
        self.programs: dict[str, Sequence[Program]] = {}
        self.precision: dict[str, str] = {}
        self._limits: dict[tuple[str, bytes], tuple[np.ndarray, Limit]] = {}
        self.models = {key: (model, copy.deepcopy(model).double()) for key, model in models.items()}
        self.graphs = graphs_of(name, graphs, max_batch=max(BATCHES))
        self.add("eager", [eager(as_released(models["gmm"]), device)], "fp32")

    def add(self, name: str, copies: Sequence[Program], precision: str) -> None:
        """Add a program.

        name: the name of the program, with the suffix `` plain`` if the program runs the plain model.
        copies: copies of the program, as for `time_rounds`.  precision: the precision of the program.
        """
        self.programs[name] = copies
        self.precision[name] = precision

    def saved(self, graph: str) -> Path:
        path = self.folder / f"{graph}.onnx"
        if not path.exists():
            onnx.save(self.graphs[graph], path)
        return path

    def limits(self, name: str, images: np.ndarray) -> tuple[np.ndarray, Limit]:
        """Return (PyTorch's float64 logits for these images, the limit for this program's distance from them)."""
        key = (name, images.tobytes())
        if key not in self._limits:
            self._limits[key] = self._computed_limits(name, images)
        return self._limits[key]

    def _computed_limits(self, name: str, images: np.ndarray) -> tuple[np.ndarray, Limit]:
        model, exact = self.models["plain" if name.endswith(" plain") else "gmm"]
        with torch.inference_mode():
            tensor = torch.from_numpy(images)
            trained, truth = model(tensor).numpy(), exact(tensor.double()).numpy()
        measure = ErrorMeasure()
        measure.add(trained, truth)
        recorded = None
        if self.precision[name] == "int8":
            recorded = float(np.abs(emulated_logits(self.graphs["int8"], images[:8], name="int8") - truth[:8]).max())
        return truth, limit_from_noise(measure.noise(), self.precision[name], recorded=recorded)


def checked(family: Family, logits: dict[str, np.ndarray], images: np.ndarray) -> dict[str, dict[str, float]]:
    """Return name of a program → the distance of the program's logits from PyTorch's float64 logits, and the limit.

    The distance is the largest of the last timed run and of a run of every copy.
    Errors: SystemExit when a distance exceeds the limit.
    """
    distances = {}
    for name, answers in logits.items():
        truth, limit = family.limits(name, images)
        of_copies = (program(images) for program in family.programs[name])
        off = max(distance(values, truth) for values in (answers, *of_copies))
        if not off <= limit.largest:
            raise SystemExit(f"{name}: the logits differ by {off:.2g}, expected at most {limit.largest:.2g}")
        distances[name] = {"off": off, "limit": limit.largest}
    return distances


def rows_of(family: Family, timed: Timed, batch: int, lines: dict[str, Roofline]) -> dict[str, Any]:
    work = work_of_graph(copy.deepcopy(family.graphs["gmm"]), batch)
    times, apart = timed.ms, timed.core_to_core_ns
    least = min(readings.min() for readings in apart.values())
    rows: dict[str, Any] = {}
    for name, values in times.items():
        row: dict[str, Any] = {"median_ms": float(np.median(values)), "precision": family.precision[name]}
        row["times_faster_than_eager"] = ratio(times["eager"], values)
        if "straight export" in times:
            row["times_faster_than_straight_export"] = ratio(times["straight export"], values)
        if f"{name} plain" in times:
            row["over_plain"] = ratio(values, times[f"{name} plain"])
        row |= cores_near(values, apart[name], least)
        line = lines.get(family.precision[name])
        if line is not None and not name.endswith(" plain"):
            for part in (row, row["near"]) if "near" in row else (row,):
                part["share_of_roofline"] = line.least_ms(work) / part["median_ms"]
        rows[name] = row
    return rows


def cores_near(ms: np.ndarray, apart_ns: np.ndarray, least_ns: float) -> dict[str, Any]:
    """Return the share of the rounds with cores far apart, and the median time of the other rounds.

    far: the share of the rounds in which the cores were far apart (`FAR`).
    near: the number and the median time of the other rounds, if there are enough rounds for a median.
    The result is empty if the distance of the cores could not be measured (NaN).
    """
    if not np.isfinite(least_ns):
        return {}
    near = ms[apart_ns <= FAR * least_ns]
    shares: dict[str, Any] = {"far": 1 - len(near) / len(ms)}
    if len(near) >= ENOUGH[0.5]:
        shares["near"] = {"rounds": len(near), "median_ms": float(np.median(near))}
    return shares


def print_rows(family: str, batch: int, rows: dict[str, Any]) -> None:
    for name, row in rows.items():
        if name.endswith(" plain"):
            continue
        parts = [f"{row['median_ms']:.2f} ms", f"{row['times_faster_than_eager'].median:.2f} × eager"]
        if "times_faster_than_straight_export" in row:
            parts.append(f"{row['times_faster_than_straight_export'].median:.2f} × straight export")
        if "share_of_roofline" in row:
            near = f" ({row['near']['share_of_roofline']:.0%} with cores near)" if "near" in row else ""
            parts.append(f"{row['share_of_roofline']:.0%} of the roofline{near}")
        if "over_plain" in row:
            parts.append(f"with mask / plain {row['over_plain'].median:.3f}")
        print(f"{family}, batch {batch}, {name}: {', '.join(parts)}")


def measured(family: Family, name: str, batches: Sequence[int], rounds: int, device: Device) -> dict[str, Any]:
    """Measure a family, and return the results, with a roofline for every precision of the programs.

    core_to_core_ns: batch → quartiles of the round trips between two cores, measured before and after every turn.
    """
    works = [work_of_graph(copy.deepcopy(family.graphs["gmm"]), batch) for batch in batches]
    precisions: list[tuple[str, Device]] = [
        (precision, device) for precision in dict.fromkeys(family.precision.values())
    ]
    lines = measured_rooflines(works, precisions)
    of_batch = {
        batch: time_rounds(family.programs, batch, rounds * _ROUNDS[batch], image_shape=family.image_shape)
        for batch in batches
    }
    lines = measured_rooflines(works, precisions, seen=lines)
    by_precision = {precision: line for (precision, _), line in lines.items()}
    results: dict[str, Any] = {
        "roofline": {
            precision: {"gflops": line.best.gflops, "library": line.best.library, "shape": line.best.shape}
            for precision, line in by_precision.items()
        },
        "mflop_an_image": works[0].operations / works[0].batch / 1e6,
        "core_to_core_ns": {},
    }
    for batch, timed in of_batch.items():
        rows = rows_of(family, timed, batch, by_precision)
        for program, check in checked(family, timed.logits, timed.images).items():
            rows[program].update(check)
        results[str(batch)] = rows
        readings = np.concatenate(list(timed.core_to_core_ns.values()))
        results["core_to_core_ns"][str(batch)] = (
            np.percentile(readings, [25, 50, 75]).tolist() if np.isfinite(readings).all() else None
        )
        print_rows(name, batch, rows)
    return results


def main(
    script: str, description: str, *, graphs: Sequence[str], add_programs: Callable[[Family], None], device: Device
) -> None:
    """Run the command line of a script.

    script: the path of the script.  description: the description in the help text.
    graphs: the names of the graphs, as for `graphs_of`.
    add_programs: a function that adds the script's programs to a family, which already has eager PyTorch.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rounds", type=int, default=15, help="rounds of a batch of 64; a single image gets four times as many"
    )
    parser.add_argument("--family", choices=FAMILIES, action="append", help="only this family; may be repeated")
    parser.add_argument("--batch", type=int, choices=BATCHES, action="append", help="only this batch; may be repeated")
    result = result_of(script, suffix="")
    parser.add_argument("--output", type=Path, default=result, help="folder for the results, a file for each family")
    arguments = parser.parse_args()
    for name in arguments.family or FAMILIES:  # families are not compared, so each has its own run card
        output = arguments.output / f"{name}.json"
        with (
            tempfile.TemporaryDirectory() as folder,
            run_card.written(output, Path(script).name, rounds=arguments.rounds) as results,
        ):
            family = Family(name, Path(folder), graphs, device)
            add_programs(family)
            results.update(measured(family, name, arguments.batch or BATCHES, arguments.rounds, device))
