"""How much faster than PyTorch can each family be served on a CPU, how near to the hardware, and is a mask free?

The five models of the paper as its released code names them (32×32, 10 classes, GMM with K = 5 a head), random
weights, and their plain twins with the same weights and no mask. Side by side in one process:

    eager              PyTorch, attention as the released code writes it (Einsum)
    straight export    the same module exported unfolded, in ONNX Runtime: what one has without this project
    onnxruntime        our export, chunked as our runner does it
    openvino[:type]    our export in OpenVINO, float32 or bf16; :int8 the Q/DQ graph that `gmmvit convert` writes
    … plain            the twin of the same, for what the mask costs

Ratios are medians of the rounds' own ratios, with bootstrap intervals. Answers of every timed program are held
to the limits of parity (`gmmvit_deploy/tolerances.py`) in the same run; a wrong one stops the script. The roofline
is measured right before each family: the best library on the model's own matrix products.

    python benchmarks/fastest_cpu.py [--rounds 15] [--output benchmarks/results/fastest_cpu.json]
"""

from __future__ import annotations

import argparse
import copy
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import run_card
import torch
from families import FAMILIES, as_released, eager, graphs_of, pair
from interleaved import ratio, time_rounds

from gmmvit_deploy.bench.roofline import Roofline, measured_roofline, work_of_graph
from gmmvit_deploy.graphs.emulate import emulated_logits
from gmmvit_deploy.parity.measures import ErrorMeasure, distance
from gmmvit_deploy.runtime.onnxruntime import ROWS_A_CORE, session_from_onnx
from gmmvit_deploy.runtime.openvino_program import Hint, OpenVinoProgram
from gmmvit_deploy.tolerances import Limit, limit_from_noise

BATCHES = (1, 64)
Program = Callable[[np.ndarray], np.ndarray]


def with_onnxruntime(path: Path, *, chunked: bool) -> Program:
    session = session_from_onnx(path)
    chunk = ROWS_A_CORE * len(os.sched_getaffinity(0)) if chunked else max(BATCHES)

    def run(images: np.ndarray) -> np.ndarray:
        starts = range(0, len(images), chunk)
        return np.concatenate([session.run(["logits"], {"tensor": images[at : at + chunk]})[0] for at in starts])

    return run


def with_openvino(path: Path, hint: Hint) -> Program:
    return OpenVinoProgram(str(path), hint=hint).run


class Family:
    """The programs of one family, and what their answers are held to."""

    def __init__(self, name: str, folder: Path, precisions: dict[str, Hint]) -> None:
        models = pair(name)
        self.folder = folder
        self.programs: dict[str, Program] = {}
        self.precision: dict[str, str] = {}
        self.models = {key: (model, copy.deepcopy(model).double()) for key, model in models.items()}
        self._note("eager", eager(as_released(models["gmm"])), "fp32")
        graphs = graphs_of(models, ("straight", "gmm", "plain", "int8"), max_batch=max(BATCHES))
        paths = {key: self._saved(key, graph) for key, graph in graphs.items()}
        self._note("straight export", with_onnxruntime(paths["straight"], chunked=False), "fp32")
        for key in models:
            suffix, path = "" if key == "gmm" else " plain", paths[key]
            self._note(f"onnxruntime{suffix}", with_onnxruntime(path, chunked=True), "fp32")
            for precision, hint in precisions.items():
                name = "openvino" if precision == "fp32" else f"openvino:{precision}"
                self._note(f"{name}{suffix}", with_openvino(path, hint), precision)
        self._note("openvino:int8", with_openvino(paths["int8"], "f32"), "int8")
        self.graph, self.int8 = graphs["gmm"], graphs["int8"]

    def limits(self, name: str, images: np.ndarray) -> tuple[np.ndarray, Limit]:
        """(float64 logits, how far from them this program may be) on these images."""
        model, exact = self.models["plain" if name.endswith(" plain") else "gmm"]
        with torch.inference_mode():
            tensor = torch.from_numpy(images)
            trained, truth = model(tensor).numpy(), exact(tensor.double()).numpy()
        measure = ErrorMeasure()
        measure.add(trained, truth)
        recorded = None
        if self.precision[name] == "int8":
            recorded = float(np.abs(emulated_logits(self.int8, images[:8], name="int8") - truth[:8]).max())
        return truth, limit_from_noise(measure.noise(), self.precision[name], recorded=recorded)

    def _note(self, name: str, program: Program, precision: str) -> None:
        self.programs[name] = program
        self.precision[name] = precision

    def _saved(self, name: str, proto: onnx.ModelProto) -> Path:
        path = self.folder / f"{name}.onnx"
        onnx.save(proto, path)
        return path


def checked(family: Family, logits: dict[str, np.ndarray], images: np.ndarray) -> dict[str, dict[str, float]]:
    """Distance of the last timed answers from the truth, and the limit; stops where one is beyond it."""
    found = {}
    for name, answers in logits.items():
        truth, limit = family.limits(name, images)
        off = distance(answers, truth)
        if not off <= limit.largest:
            raise SystemExit(f"{name}: its logits are {off:.2g} off, {limit.largest:.2g} is allowed; its time is void")
        found[name] = {"off": off, "limit": limit.largest}
    return found


def rows_of(
    family: Family, times: dict[str, np.ndarray], batch: int, lines: dict[str, Roofline | None]
) -> dict[str, Any]:
    work = work_of_graph(copy.deepcopy(family.graph), batch)
    rows: dict[str, Any] = {}
    for name, values in times.items():
        row: dict[str, Any] = {"median_ms": float(np.median(values)), "precision": family.precision[name]}
        row["times_faster_than_eager"] = ratio(times["eager"], values)
        row["times_faster_than_straight_export"] = ratio(times["straight export"], values)
        if f"{name} plain" in times:
            row["over_plain"] = ratio(values, times[f"{name} plain"])
        line = lines.get(family.precision[name])
        if line is not None and not name.endswith(" plain"):
            row["share_of_roofline"] = line.least_ms(work) / row["median_ms"]
        rows[name] = row
    return rows


def said(family: str, batch: int, rows: dict[str, Any]) -> None:
    for name, row in rows.items():
        if name.endswith(" plain"):
            continue
        faster = f"{row['times_faster_than_eager']['median']:.2f} × eager"
        straight = f"{row['times_faster_than_straight_export']['median']:.2f} × straight"
        share = f"{row['share_of_roofline']:.0%} of the roofline" if "share_of_roofline" in row else ""
        over = f"{row['over_plain']['median']:.3f} of plain" if "over_plain" in row else ""
        print(f"{family}, batch {batch}, {name}: {row['median_ms']:.2f} ms, {faster}, {straight} {share} {over}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--family", choices=FAMILIES, action="append", help="only this one; may be repeated")
    parser.add_argument("--batch", type=int, choices=BATCHES, action="append", help="only this one")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "fastest_cpu.json")
    arguments = parser.parse_args()
    with run_card.written(arguments.output, "fastest_cpu.py", rounds=arguments.rounds) as results:
        precisions: dict[str, Hint] = {"fp32": "f32"}
        if "avx512_bf16" in Path("/proc/cpuinfo").read_text():
            precisions["bf16"] = "bf16"
        results["families"] = {}
        for name in arguments.family or FAMILIES:
            with tempfile.TemporaryDirectory() as folder:
                family = Family(name, Path(folder), precisions)
                works = [work_of_graph(copy.deepcopy(family.graph), batch) for batch in arguments.batch or BATCHES]
                lines = {one: measured_roofline(works, one) for one in (*precisions, "int8")}
                found: dict[str, Any] = {
                    "roofline": {
                        one: {"gflops": line.best.gflops, "library": line.best.library, "shape": line.best.shape}
                        for one, line in lines.items()
                        if line is not None
                    },
                    "mflop_an_image": works[0].operations / 1e6,
                }
                for batch in arguments.batch or BATCHES:
                    times, logits, images = time_rounds(family.programs, batch, arguments.rounds)
                    rows = rows_of(family, times, batch, lines)
                    for program, check in checked(family, logits, images).items():
                        rows[program].update(check)
                    found[str(batch)] = rows
                    said(name, batch, rows)
                results["families"][name] = found


if __name__ == "__main__":
    main()
