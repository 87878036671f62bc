"""Time the programs of a model in the same rounds, check their logits, and report ratios and shares of a roofline.

`fastest_cpu.py` and `fastest_gpu.py` use this module with different programs.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from benchmarks.shared import run_card
from benchmarks.shared.families import as_released, eager, graphs_of, pair
from benchmarks.shared.interleaved import Program, Timed, time_rounds
from benchmarks.shared.options import parsed, script_parser
from benchmarks.shared.systems import MEASURED, SYSTEMS
from gmmvit_deploy.bench.roofline import Roofline, measured_rooflines, work_of_graph
from gmmvit_deploy.errors import GmmvitError, MissingDependencyError, RunnerUnavailableError
from gmmvit_deploy.inference.precision import QUANTIZED
from gmmvit_deploy.measure.statistics import ratio
from gmmvit_deploy.models.specs import input_shape
from gmmvit_deploy.parity.measures import ErrorMeasure, distance
from gmmvit_deploy.runtimes.programs.emulated_precision import emulated_logits
from gmmvit_deploy.runtimes.runners.runner import Device
from gmmvit_deploy.tolerances import Limit, limit_from_noise

BATCHES = (1, 64)
_ROUNDS = {1: 2, 64: 1}  # batch → factor for the rounds; single images take less time and vary more


class Family:
    """The programs of a family or system, and the limits for their logits.

    models: ``trained`` and, if there is one, the twin ``plain`` → (the model, the model in float64).
    programs: name → copies.  missing: name → why this machine cannot run it.
    straight: the programs of users without this project, whose wrong logits do not stop a script.
    without_kernels: runner → why our kernels compute no part of its graph.
    only: the programs to measure besides eager PyTorch; None measures all.  nncf: the Python that has NNCF, or None.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        graphs: Sequence[str],
        device: Device,
        *,
        only: Sequence[str] | None = None,
        nncf: str | None = None,
    ) -> None:
        models = pair(name)
        self.name = name
        self.image_shape = input_shape(models["trained"].spec)
        self.folder = folder
        self.programs: dict[str, Sequence[Program]] = {}
        self.precision: dict[str, str] = {}
        self.straight: set[str] = set()
        self.only = only
        self.nncf = nncf
        self.known: list[str] = []
        self.missing: dict[str, str] = {}
        self.without_kernels: dict[str, str] = {}
        self._limits: dict[tuple[str, bytes], tuple[np.ndarray, Limit]] = {}
        self.models = {key: (model, copy.deepcopy(model).double()) for key, model in models.items()}
        present = [graph for graph in graphs if not graph.startswith("plain") or "plain" in models]
        self.graphs = graphs_of(name, present, max_batch=max(BATCHES))
        self.add("eager", [eager(as_released(models["trained"]), device)], "fp32")

    def selects(self, name: str) -> bool:
        """Return True if the program is to be measured.  Ask before the program is loaded."""
        self.known.append(name)
        return self.only is None or name in self.only

    def add(self, name: str, copies: Sequence[Program], precision: str) -> None:
        """Add copies of a program; a name that ends with `` plain`` runs the plain model."""
        self.programs[name] = copies
        self.precision[name] = precision

    def add_straight(self, name: str, load: Callable[[], Program], precision: str) -> None:
        """Add a program that users without this project run, or record why this machine cannot run it."""
        if self._loaded(name, load, precision, (GmmvitError, RuntimeError)):
            self.straight.add(name)

    def add_if_here(self, name: str, load: Callable[[], Program], precision: str) -> None:
        """Add a program of ours, or record what is not installed on this machine."""
        self._loaded(name, load, precision, (MissingDependencyError, RunnerUnavailableError))

    def _loaded(
        self, name: str, load: Callable[[], Program], precision: str, errors: tuple[type[Exception], ...]
    ) -> bool:
        """Add a program if it is selected; of ``errors``, record the reason.  Returns True if the program was added."""
        if not self.selects(name):
            return False
        try:
            self.add(name, [load()], precision)
        except errors as exc:
            self.missing[name] = f"{type(exc).__name__}: {exc}".partition("\n")[0]
            return False
        return True

    def runnable(self, batch: int) -> dict[str, Sequence[Program]]:
        """Run every program once at this size, and return those that can; only a straight one may fail."""
        images = np.zeros((batch, *self.image_shape), np.float32)
        programs: dict[str, Sequence[Program]] = {}
        for name, copies in self.programs.items():
            try:
                copies[0](images)
            except Exception as exc:  # each library has its own errors
                if name not in self.straight:
                    raise
                self.missing[f"{name}, batch {batch}"] = f"{type(exc).__name__}: {exc}".partition("\n")[0]
                continue
            programs[name] = copies
        return programs

    def saved(self, graph: str) -> Path:
        """Write a graph of `graphs_of` to a file, and return its path.  A graph that is missing is exported first."""
        if graph not in self.graphs:
            self.graphs |= graphs_of(self.name, [graph], max_batch=max(BATCHES))
        path = self.folder / f"{graph}.onnx"
        if not path.exists():
            ir.save(self.graphs[graph], path)
        return path

    def judged(self, name: str) -> bool:
        """Return False for another project's int8, whose answers `int8_real.py` measures with trained weights."""
        return name not in self.straight or self.precision[name] != "int8"

    def limits(self, name: str, images: np.ndarray) -> tuple[np.ndarray, Limit]:
        """Return (PyTorch's float64 logits for these images, the limit for this program's distance from them)."""
        key = (name, images.tobytes())
        if key not in self._limits:
            self._limits[key] = self._computed_limits(name, images)
        return self._limits[key]

    def _computed_limits(self, name: str, images: np.ndarray) -> tuple[np.ndarray, Limit]:
        model, exact = self.models["plain" if name.endswith(" plain") else "trained"]
        with torch.inference_mode():
            tensor = torch.from_numpy(images)
            trained, truth = model(tensor).numpy(), exact(tensor.double()).numpy()
        measure = ErrorMeasure()
        measure.add(trained, truth)
        recorded = None
        if (precision := self.precision[name]) in QUANTIZED:
            # The graph that the programs of this device run.
            graph = self.graphs[precision if precision in self.graphs else f"{precision}_cpu"]
            emulated = emulated_logits(graph, images[:8], name=precision)
            recorded = float(np.abs(emulated - truth[:8]).max())
        return truth, limit_from_noise(measure.noise(), self.precision[name], recorded=recorded)


def checked(family: Family, logits: dict[str, np.ndarray], images: np.ndarray) -> dict[str, dict[str, float]]:
    """Return name → the largest distance from PyTorch's float64 logits, and the limit.  Errors: SystemExit."""
    distances = {}
    for name, answers in logits.items():
        truth, limit = family.limits(name, images)
        of_copies = (program(images) for program in family.programs[name])
        # np.max, unlike max, is NaN if any distance is NaN: logits that are not finite.
        off = float(np.max([distance(values, truth) for values in (answers, *of_copies)]))
        if not off <= limit.largest and name not in family.straight:
            raise SystemExit(f"{name}: the logits differ by {off:.2g}, expected at most {limit.largest:.2g}")
        distances[name] = {"off": off, "limit": limit.largest}
    return distances


def best_straight(
    family: Family, times: dict[str, np.ndarray], precision: str, checks: dict[str, dict[str, float]]
) -> str | None:
    """Return the fastest straight program in this precision with right logits, or None."""
    right = [
        name
        for name in times
        if name in family.straight
        and family.precision[name] == precision
        and (not family.judged(name) or checks[name]["off"] <= checks[name]["limit"])
    ]
    return min(right, key=lambda name: float(np.median(times[name])), default=None)


def rows_of(
    family: Family, timed: Timed, batch: int, lines: dict[str, Roofline], checks: dict[str, dict[str, float]]
) -> dict[str, Any]:
    """Return name of a program → the row of the results."""
    work = work_of_graph(family.graphs["trained"], batch)
    times = timed.ms
    rows: dict[str, Any] = {}
    for name, values in times.items():
        row: dict[str, Any] = {"median_ms": float(np.median(values)), "precision": family.precision[name]}
        row["times_faster_than_eager"] = ratio(times["eager"], values)
        if "straight export" in times:
            row["times_faster_than_straight_export"] = ratio(times["straight export"], values)
        if name in family.straight:
            if family.judged(name):
                row["right"] = checks[name]["off"] <= checks[name]["limit"]
        elif name != "eager" and (best := best_straight(family, times, family.precision[name], checks)):
            row["best_straight"] = best
            row["times_faster_than_best_straight"] = ratio(times[best], values)
        if name in family.without_kernels:
            row["without_kernels"] = family.without_kernels[name]
        if f"{name} plain" in times:
            row["over_plain"] = ratio(values, times[f"{name} plain"])
        line = lines.get(family.precision[name])
        if line is not None and not name.endswith(" plain"):
            row["share_of_roofline"] = line.min_ms(work) / row["median_ms"]
        rows[name] = row | checks[name]
    return rows


def check_logits(family: Family, batch: int) -> None:
    """Compare the logits of every program with the limits, and print the distances; time and write nothing."""
    programs = family.runnable(batch)
    images = np.random.default_rng(batch).standard_normal((batch, *family.image_shape), dtype=np.float32)
    logits = {program: copies[-1](images) for program, copies in programs.items()}
    for program, row in checked(family, logits, images).items():
        words = "" if row["off"] <= row["limit"] or not family.judged(program) else ": WRONG logits"
        distance = f"{row['off']:.2g} from PyTorch's float64 logits, limit {row['limit']:.2g}"
        print(f"{family.name}, batch {batch}, {program}: {distance}{words}", flush=True)


def print_rows(family: str, batch: int, rows: dict[str, Any]) -> None:
    for name, row in rows.items():
        if name.endswith(" plain"):
            continue
        parts = [f"{row['median_ms']:.2f} ms", f"{row['times_faster_than_eager'].value:.2f} × eager"]
        if "times_faster_than_straight_export" in row:
            parts.append(f"{row['times_faster_than_straight_export'].value:.2f} × straight export")
        if "times_faster_than_best_straight" in row:
            parts.append(f"{row['times_faster_than_best_straight'].value:.2f} × {row['best_straight']}")
        if not row.get("right", True):
            parts.append("WRONG logits")
        if "share_of_roofline" in row:
            parts.append(f"{row['share_of_roofline']:.0%} of the roofline")
        if "over_plain" in row:
            parts.append(f"with mask / plain {row['over_plain'].value:.3f}")
        print(f"{family}, batch {batch}, {name}: {', '.join(parts)}")


def measured(
    family: Family, name: str, batches: Sequence[int], rounds: int, device: Device, *, with_roofline: bool = True
) -> dict[str, Any]:
    """Measure a family, and return the results; with_roofline: with a roofline for every precision."""
    works = [work_of_graph(family.graphs["trained"], batch) for batch in batches]
    precisions: list[tuple[str, Device]] = [
        (precision, device) for precision in dict.fromkeys(family.precision.values()) if with_roofline
    ]
    lines = measured_rooflines(works, precisions)
    of_batch = {
        batch: time_rounds(family.runnable(batch), batch, rounds * _ROUNDS[batch], image_shape=family.image_shape)
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
    }
    if name in SYSTEMS:
        results["size"] = SYSTEMS[name].size
    if family.missing:
        results["missing"] = family.missing
    for batch, timed in of_batch.items():
        rows = rows_of(family, timed, batch, by_precision, checked(family, timed.logits, timed.images))
        results[str(batch)] = rows
        print_rows(name, batch, rows)
    return results


def main(
    script: str,
    description: str,
    *,
    graphs: Sequence[str],
    add_programs: Callable[[Family], None],
    device: Device,
    checked_alone: Sequence[str],
) -> None:
    """Run the command line of a script.

    graphs: as for `graphs_of`.  add_programs: adds the script's programs to a family.
    checked_alone: the programs that ``--check`` without other options checks.
    """
    parser = script_parser(description, script, suffix="")
    parser.add_argument(
        "--rounds", type=int, default=15, help="rounds of a batch of 64; a single image gets twice as many"
    )
    parser.add_argument(
        "--family", choices=MEASURED, action="append", help="only this family or system; may be repeated"
    )
    parser.add_argument("--batch", type=int, choices=BATCHES, action="append", help="only this batch; may be repeated")
    parser.add_argument(
        "--program", action="append", help="only eager PyTorch and this program, such as openvino+kernels; repeatable"
    )
    parser.set_defaults(nncf=None)
    if device == "cpu":
        parser.add_argument("--nncf", metavar="PYTHON", help="also measure int8 by NNCF; Python with nncf and onnx")
    parser.add_argument("--no-roofline", action="store_true", help="leave the rooflines out of the results")
    arguments = parsed(
        parser,
        check="check the logits of every program, and time nothing",
        family=["vit"],
        batch=[1],
        program=list(checked_alone),
    )
    batches = arguments.batch or BATCHES

    def family_of(name: str, folder: Path) -> Family:
        family = Family(name, folder, graphs, device, only=arguments.program, nncf=arguments.nncf)
        add_programs(family)
        if unknown := set(arguments.program or ()) - set(family.known):
            raise SystemExit(f"{name}: expected --program {', '.join(family.known)}, got {', '.join(unknown)}")
        return family

    for name in arguments.family or MEASURED:  # families are not compared, so each has its own run card
        output = arguments.output / f"{name}.json"
        with tempfile.TemporaryDirectory() as folder:
            if arguments.check:
                family = family_of(name, Path(folder))
                for batch in batches:
                    check_logits(family, batch)
                for program, reason in (family.missing | family.without_kernels).items():
                    print(f"{name}, {program}: {reason}", flush=True)
                continue
            with run_card.written(output, Path(script).name, rounds=arguments.rounds) as results:
                family, roofline = family_of(name, Path(folder)), not arguments.no_roofline
                results |= measured(family, name, batches, arguments.rounds, device, with_roofline=roofline)
