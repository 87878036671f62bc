"""Measure in ten minutes how fast this machine runs what matters, and compare it with the committed results.

    families   vit, swin, cait, pit and t2t (`fastest_cpu.py`, fewer rounds), a single image and a batch of 64
    cores      vit on one logical processor, on half of them, on those of each NUMA node, and on all
    ViT-S      timm's ViT-S/16 for images of 224 pixels in float32 (`timm_models.py`), and with ``--nncf`` in int8

Each run is a file with its run card, which has the processor and its instruction sets. The printed table has, for each
run, our speed relative to the straight export in OpenVINO in the same precision (with ``--nncf``, in int8 relative to
NNCF's), and that of the committed result of the same network, in which other straight programs are compared too. †: the
run card says INVALID. Send the folder in where a ratio is below 1, or the processor is new.

    python benchmarks/measure_here.py [--nncf PYTHON] [--minutes 10] [--check] [--output FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.shared.cpu_programs import HAS_BF16
from benchmarks.shared.options import parsed, script_parser
from benchmarks.shared.places import BENCHMARKS, FAMILIES, RESULTS, ROOT
from benchmarks.shared.results import cross_of, interval, table
from gmmvit_deploy.inference.cores import allowed_processors, int8_saturates

_ROUNDS = 4
_PROGRAMS = ("straight openvino", "openvino+kernels", *(() if int8_saturates() else ("openvino+kernels:int8",)))
_IN_BF16 = ("straight openvino:bf16", "openvino+kernels:bf16") if HAS_BF16 else ()
_VIT_S = "vit_small_patch16_224"


def nodes(folder: Path = Path("/sys/devices/system/node")) -> dict[str, set[int]]:
    """Return name of a NUMA node → its processors; empty if the system states none."""
    found = {}
    for path in sorted(folder.glob("node[0-9]*/cpulist")):
        ranges = [part.split("-") for part in path.read_text().split(",") if part.strip()]
        found[path.parent.name] = {number for ends in ranges for number in range(int(ends[0]), int(ends[-1]) + 1)}
    return found


def places() -> dict[str, set[int]]:
    """Return name of a set of processors → the set: one, half, each NUMA node of several, all; each set once."""
    every = allowed_processors()
    sets = {"1 core": {every[0]}, f"{len(every) // 2} cores": set(every[: len(every) // 2])}
    sets |= {name: numbers & set(every) for name, numbers in nodes().items()} | {"all": set(every)}
    kept: dict[str, set[int]] = {}
    for name, numbers in sets.items():
        if numbers and numbers not in kept.values() and (name == "all" or numbers != set(every)):
            kept[name] = numbers
    return kept


def commands(output: Path, nncf: str | None, rounds: int) -> Iterator[tuple[set[int], Path, list[str]]]:
    """Yield (processors, file of the result, the command), what matters most first."""
    options = ["--rounds", str(rounds), *(["--nncf", nncf] if nncf else [])]
    names = (*_PROGRAMS, *_IN_BF16, *(("nncf openvino:int8",) if nncf else ()))
    programs = [part for name in names for part in ("--program", name)]
    sets = places()

    def of_family(place: str, family: str) -> tuple[set[int], Path, list[str]]:
        folder = output / place.replace(" ", "_")
        command = ["fastest_cpu.py", "--family", family, "--no-roofline", *programs, *options, "--output", str(folder)]
        return sets[place], folder / f"{family}.json", command

    yield of_family("all", "vit")
    yield from (of_family(place, "vit") for place in sets if place != "all")
    command = ["timm_models.py", "--model", _VIT_S, "--part", "speed", *options, "--output", str(output / "all")]
    yield sets["all"], output / "all" / f"{_VIT_S}.speed.json", command
    yield from (of_family("all", family) for family in FAMILIES if family != "vit")


def ratios(result: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    """Return (batch, precision) → our speed relative to the fastest straight program, with its interval."""
    found = {}
    if "batches" in result:  # of timm_models.py
        fields = {"fp32": "times_faster_than_straight_openvino", "int8": "int8_times_faster_than_nncf"}
        rows = [
            (batch, precision, field, row)
            for batch, row in result["batches"].items()
            for precision, field in fields.items()
        ]
    else:
        field = "times_faster_than_best_straight"
        batches = [batch for batch in result if batch.isdigit()]
        rows = [(batch, row["precision"], field, row) for batch in batches for row in result[batch].values()]
    for batch, precision, field, row in rows:
        if field in row:
            found[batch, precision] = interval(row[field]) + cross_of(result, batch)
    return found


def rows_of(file: Path) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table for a result: where, network, batch, precision, here, committed result."""
    name = file.name.removesuffix(".json")
    model = name.removesuffix(".speed")
    script = "fastest_cpu" if model == name else "timm_models"
    committed = RESULTS / script / file.name
    there = json.loads(committed.read_text()) if committed.exists() else {}
    known, machine = ratios(there), there.get("card", {}).get("cpu", "")
    for key, value in ratios(json.loads(file.read_text())).items():
        yield file.parent.name, model, *key, value, f"{known[key]}, {machine}" if key in known else ""


def main() -> None:
    parser = script_parser(__doc__, __file__, suffix="")
    parser.set_defaults(output=ROOT / "measured-here")
    parser.add_argument("--nncf", metavar="PYTHON", help="the Python of an environment with NNCF; also times its int8")
    parser.add_argument("--minutes", type=float, default=10, help="start no further run after this time")
    arguments = parsed(parser, check="measure once what fits into half a minute", minutes=0.5)
    with tempfile.TemporaryDirectory() as folder:
        measure(arguments, Path(folder) if arguments.check else arguments.output.resolve())


def measure(arguments: argparse.Namespace, output: Path) -> None:
    """Run what fits into the time, and print the table.  Errors: SystemExit when a run failed."""
    files: list[Path] = []
    failed = 0
    started, all_processors = time.monotonic(), allowed_processors()
    for processors, file, command in commands(output, arguments.nncf, 1 if arguments.check else _ROUNDS):
        if files and time.monotonic() - started > 60 * arguments.minutes:
            print(f"left out for time: {file}")
            continue
        os.sched_setaffinity(0, processors)  # of the script that starts now, too
        done = subprocess.run([sys.executable, BENCHMARKS / command[0], *command[1:]], cwd=ROOT, check=False)
        os.sched_setaffinity(0, all_processors)
        if done.returncode:
            failed += 1
            print(f"failed with exit status {done.returncode}: {' '.join(command)}")
        elif file.exists():
            files.append(file)
    head = ("processors", "network", "batch", "precision", "times as fast as the straight export", "committed result")
    print(table(head, [row for file in files for row in rows_of(file)]))
    if failed:
        raise SystemExit(f"{failed} runs failed")


if __name__ == "__main__":
    main()
