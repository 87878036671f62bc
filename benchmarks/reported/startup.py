"""How long does the help text take to appear, compared with the bare import of typer and rich?

The bare import is `python -c "import typer, rich"`. In each round, the bare import and every `gmmvit COMMAND --help`
run once, each in a new process, in a random order. The ratio is the time of the command divided by the time of the
bare import. Both times include the start of Python. typer itself imports more for a command with options than the bare
import does; the help of a typer program with a single option shows how much.

    python benchmarks/reported/startup.py [--rounds 25] [--check] [--output RESULT]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shared.options import parsed
from benchmarks.shared.places import result_of
from gmmvit_cli.commands import JOBS
from gmmvit_deploy.bench import run_card
from gmmvit_deploy.bench.interleaved import turns
from gmmvit_deploy.bench.statistics import ratio
from gmmvit_deploy.bench.words import ratio_words

BARE = "import typer, rich"
TYPER = "typer command with one option --help"
_TYPER = "import typer\n\ndef run(count: int = typer.Option(1)) -> None: ...\n\ntyper.run(run)"
HELP = "gmmvit --help"


def programs() -> dict[str, list[str]]:
    """Return name → command line, for the bare import and for the help of the program and of every command."""
    gmmvit = [sys.executable, "-m", "gmmvit_cli.main"]
    commands = [name for names in JOBS.values() for name in names]
    return {
        BARE: [sys.executable, "-c", BARE],
        TYPER: [sys.executable, "-c", _TYPER, "--help"],
        HELP: [*gmmvit, "--help"],
        **{f"gmmvit {name} --help": [*gmmvit, name, "--help"] for name in commands},
    }


def milliseconds(command: list[str], expected: str) -> float:
    """Run a process, and return its time in milliseconds.  expected: a word that the output must contain."""
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    elapsed = (time.perf_counter() - start) * 1e3
    if done.returncode or expected not in done.stdout:
        raise SystemExit(f"{' '.join(command)}: expected {expected!r} and exit status 0\n{done.stdout}{done.stderr}")
    return elapsed


def measured(rounds: int) -> dict[str, Any]:
    commands = programs()
    times: dict[str, list[float]] = {name: [] for name in commands}
    for name, timed in turns(list(commands), rounds, np.random.default_rng(0)):
        ms = milliseconds(commands[name], "" if name == BARE else "Usage")
        if timed:
            times[name].append(ms)
    return {
        name: {"ms": float(np.median(times[name])), "over_bare": ratio(times[name], times[BARE])} for name in commands
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--output", type=Path, default=result_of(__file__))
    arguments = parsed(parser, rounds=1)
    with run_card.written(arguments.output, Path(__file__).name, rounds=arguments.rounds) as results:
        results["programs"] = measured(arguments.rounds)
        for name, row in results["programs"].items():
            print(f"{name}: {row['ms']:.0f} ms, {ratio_words(row['over_bare'], 2)} times the bare import")


if __name__ == "__main__":
    main()
