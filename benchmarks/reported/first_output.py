"""How long do the commands need until their first useful output, and in which parts of their work?

The checkpoint is the paper's ViT d9 with a Gaussian mixture mask (32×32, 10 classes, random weights). The commands are

    export      writes the bundle
    parity      compares the default runners
    classify    classifies a PNG file in this machine's best runner
    serve       starts a server

The time of a command ends with its process, and that of serve when the server is ready.

Each command runs in a new process, which ``benchmarks/shared/timed_parts.py`` divides into parts. The time before and
after the command, in which Python starts and frees its objects, is a part of its own. ``repeated`` lists
the sessions, compilations and digests of the same bytes that the process computed more than once. With ``--before``, a
second checkout of the project takes turns with this checkout in each round, and the ratio is after / before.

    python benchmarks/reported/first_output.py [--before CHECKOUT] [--rounds 5] [--check] [--output RESULT]
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.shared.checkouts import commit_of, environment_of
from benchmarks.shared.options import parsed
from benchmarks.shared.places import ROOT, result_of
from gmmvit_deploy.bench import run_card
from gmmvit_deploy.bench.interleaved import turns
from gmmvit_deploy.bench.statistics import ratio
from gmmvit_deploy.bench.words import ratio_words
from gmmvit_deploy.demo.models import save_checkpoint
from gmmvit_deploy.serving.local_http import answers
from tests.random_bundles import random_vit

TIMER = ROOT / "benchmarks" / "shared" / "timed_parts.py"
COMMANDS = ("export", "parity", "classify", "serve")
BEFORE, AFTER = "before", "after"
START_AND_END = "start and end of the process"
_LIMIT_S = 300.0


def words_of(command: str, folder: Path, port: int) -> list[str]:
    """Return the arguments of a command.  ``folder`` holds the checkpoint, a bundle, a repository and an image."""
    if command == "export":
        return ["export", str(folder / "vit.pth"), "-o", str(folder / "written"), "--dataset", "cifar10", "--force"]
    if command == "parity":
        return ["parity", str(folder / "bundle")]
    if command == "classify":
        return ["classify", str(folder / "photo.png"), "--bundle", str(folder / "bundle")]
    ports = ["--http-port", str(port), "--grpc-port", "0", "--metrics-port", "0"]
    return ["serve", str(folder / "models"), *ports, "--log", str(folder / "server.log")]


def run_once(checkout: Path, command: str, folder: Path) -> dict[str, Any]:
    """Run a command in a new process.

    Returns ``seconds`` of the whole process, or until a server is ready; ``parts``, ``counts`` and ``repeated``.
    Errors: SystemExit when the command fails.
    """
    result, port = folder / "parts.json", _free_port()
    result.unlink(missing_ok=True)
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, str(TIMER), str(result), *words_of(command, folder, port)],
        env=environment_of(checkout),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if command == "serve":
        while not answers(f"http://127.0.0.1:{port}/v2/health/ready", timeout_s=1.0):
            if process.poll() is not None or time.perf_counter() - began > _LIMIT_S:
                break
            time.sleep(0.005)
        seconds = time.perf_counter() - began
        process.send_signal(signal.SIGTERM)
    text, _ = process.communicate(timeout=_LIMIT_S)
    if command != "serve":
        seconds = time.perf_counter() - began
    if not result.exists():
        raise SystemExit(f"{checkout}: gmmvit {command} ended with status {process.returncode}:\n{text}")
    written = json.loads(result.read_text(encoding="utf-8"))
    if written["status"] not in (0, None) and not (command == "serve" and written["status"] == 128 + signal.SIGTERM):
        raise SystemExit(f"{checkout}: gmmvit {command} ended with status {written['status']}:\n{text}")
    parts = written["parts"]
    if command != "serve":
        parts[START_AND_END] = seconds - sum(parts.values())
    return {"seconds": seconds, "parts": parts, "counts": written["counts"], "repeated": written["repeated"]}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def prepare(checkout: Path, folder: Path) -> None:
    """Write the checkpoint, a bundle, a repository and an image, as the checkout writes them."""
    folder.mkdir()
    save_checkpoint(random_vit(), folder / "vit.pth", epoch=0)
    Image.effect_noise((32, 32), 64).convert("RGB").save(folder / "photo.png")
    run_once(checkout, "export", folder)
    shutil.move(folder / "written", folder / "bundle")
    command = [sys.executable, "-m", "gmmvit_cli.main", "repository", "bundle", "-o", "models"]
    subprocess.run(command, cwd=folder, env=environment_of(checkout), check=True, capture_output=True)


def row_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of the runs of a command in a checkout, in seconds."""
    parts = sorted({name for run in runs for name in run["parts"]})
    return {
        "seconds": statistics.median(run["seconds"] for run in runs),
        "parts": {name: statistics.median(run["parts"].get(name, 0.0) for run in runs) for name in parts},
        "counts": runs[-1]["counts"],
        "repeated": runs[-1]["repeated"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, metavar="CHECKOUT")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=COMMANDS, action="append", help="only this command; may be repeated")
    parser.add_argument("--output", type=Path, default=result_of(__file__))
    arguments = parsed(parser, rounds=1, only=["classify"])
    checkouts = {AFTER: ROOT} if arguments.before is None else {BEFORE: arguments.before.resolve(), AFTER: ROOT}
    commits = {name: commit_of(path) for name, path in checkouts.items()}
    card = run_card.written(arguments.output, Path(__file__).name, rounds=arguments.rounds, commits=commits)
    with card as results, tempfile.TemporaryDirectory() as temporary:
        folders = {name: Path(temporary) / name for name in checkouts}
        for name, path in checkouts.items():
            prepare(path, folders[name])
        results["commands"] = {
            command: measured(command, checkouts, folders, arguments.rounds) for command in arguments.only or COMMANDS
        }


def measured(command: str, checkouts: Mapping[str, Path], folders: Mapping[str, Path], rounds: int) -> dict[str, Any]:
    """Run a command of each checkout in turns, and return a row for each checkout and the ratio after / before."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in checkouts}

    for name, _ in turns(list(checkouts), rounds, np.random.default_rng(0)):
        runs[name].append(run_once(checkouts[name], command, folders[name]))
    row: dict[str, Any] = {name: row_of(each) for name, each in runs.items()}
    print(f"{command}: " + ", ".join(f"{name} {row[name]['seconds']:.2f} s" for name in checkouts), flush=True)
    for name in checkouts:
        for part, seconds in sorted(row[name]["parts"].items(), key=lambda item: -item[1]):
            print(f"    {name}: {part} {seconds:.2f} s")
    if BEFORE in checkouts:
        row["ratio"] = ratio(*([run["seconds"] for run in runs[name]] for name in (AFTER, BEFORE)))
        print(f"    after / before {ratio_words(row['ratio'])}", flush=True)
    return row


if __name__ == "__main__":
    main()
