"""Does classification in bulk lose, double or change a row when it is killed, runs out of disk, or runs twice at once?

The images are digits with noise, every thousandth is broken; the network is the small golden ViT with Gaussian mixture
masks. A quiet run gives the expected rows. Each of these jobs must end with the same rows, bit for bit:

    kills         kill -9 of all processes of a run, at random moments before the end, and the same command again
    full disk     a disk (tmpfs) with too little space: the run must stop with an error, and go on on a larger disk
    two runs      two runs on a folder start together; the processes of one are killed
    same shard    a job of a single shard; two runs start together, and the run that works on the shard is killed
    ray           two Ray workers

A lost, doubled or changed row, and a run that does not end as expected, make the result INVALID and the exit status 1.
Mounting a disk needs root.

    python benchmarks/reported/bulk_kills.py [--images 100000] [--kills 20] [--check] [--output RESULT]
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shared.bulk_source import command, rows_of, shards_in, write_images
from benchmarks.shared.options import parsed
from benchmarks.shared.places import ROOT, result_of
from gmmvit_deploy.artifacts import Bundle
from gmmvit_deploy.bench import run_card
from gmmvit_deploy.datasets import dataset
from gmmvit_deploy.export.bundle_from_checkpoint import ExportOptions, bundle_from_checkpoint

SHARD_IMAGES = 512
"""A multiple of the batch: the batches of a job of a single shard are then those of the other jobs."""
WORKERS = 2
JOBS = ("kills", "full disk", "two runs", "same shard", "ray")
_RUN_S = 3600.0
_POLL_S = 0.01


class Jobs:
    """Starts runs, and compares their rows with those of the quiet run."""

    def __init__(self, bundle: Bundle, source: Path, folder: Path, images: int) -> None:
        self.bundle, self.source, self.folder, self.images = bundle, source, folder, images
        self.shards = -(-images // SHARD_IMAGES)
        self.expected: tuple[int, int, str] | None = None

    def start(self, to: Path, *options: str) -> subprocess.Popen[str]:
        size = () if "--shard-images" in options else ("--shard-images", str(SHARD_IMAGES))
        workers = () if "ray" in options else ("--workers", str(WORKERS))
        words = command(self.bundle, self.source, to, *size, *workers, *options)
        return subprocess.Popen(
            words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def finish(self, to: Path, *options: str) -> str:
        """Run to the end, and return stderr.  Errors: SystemExit when the run fails."""
        process = self.start(to, *options)
        _, errors = process.communicate(timeout=_RUN_S)
        if process.returncode:
            raise SystemExit(f"{to.name}: exit status {process.returncode}: {errors}")
        return errors

    def compared(self, to: Path, **facts: Any) -> dict[str, Any]:
        """Return the facts of a job with its rows, and remove its folder."""
        rows = rows_of(to)
        self.expected = self.expected or rows
        strangers = [path.name for path in to.iterdir() if not path.name.startswith(("shard-", "_"))]
        shutil.rmtree(to)
        same = rows == self.expected and not strangers
        return {"rows": rows[0], "distinct": rows[1], "sha256": rows[2], "same": same, **facts}


def kill(process: subprocess.Popen[str]) -> bool:
    """Kill all processes of a run with -9.  Return False if the run had ended."""
    if process.poll() is not None:
        return False
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return True


def await_shards(to: Path, count: int, process: subprocess.Popen[str]) -> None:
    while len(shards_in(to)) < count and process.poll() is None:
        time.sleep(_POLL_S)


def quiet(jobs: Jobs) -> dict[str, Any]:
    to = jobs.folder / "quiet"
    started = time.monotonic()
    jobs.finish(to)
    return jobs.compared(to, seconds=round(time.monotonic() - started, 1))


def kills(jobs: Jobs, count: int) -> dict[str, Any]:
    """Kill ``count`` runs: after a random number of new shards, and a random time within the next shard."""
    to = jobs.folder / "kills"
    moments = np.random.default_rng(24)
    goals = np.sort(moments.integers(0, jobs.shards - 1, count))
    killed = []
    for goal in goals:
        process = jobs.start(to)
        if goal <= len(shards_in(to)):  # at the start: while it lists the images, or starts its workers
            time.sleep(moments.uniform(0, 8))
        await_shards(to, int(goal), process)
        time.sleep(moments.uniform(0, 0.5))
        if not kill(process):
            raise SystemExit(f"the run ended before it was killed, at {len(shards_in(to))} of {jobs.shards} shards")
        killed.append(len(shards_in(to)))
    jobs.finish(to)
    return jobs.compared(to, kills=len(killed), shards_at_kills=killed)


def full_disk(jobs: Jobs) -> dict[str, Any]:
    disk = jobs.folder / "disk"
    disk.mkdir()
    space = 180 * jobs.images  # enough for the list of the images and a part of the rows
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={space}", "tmpfs", str(disk)], check=True)
    try:
        process = jobs.start(disk / "to")
        _, errors = process.communicate(timeout=_RUN_S)
        facts = {
            "exit_status_when_full": process.returncode,
            "error": next((line for line in errors.splitlines() if line.startswith("Error: ")), ""),
            "shards_when_full": len(shards_in(disk / "to")),
        }
        subprocess.run(["mount", "-o", "remount,size=4g", str(disk)], check=True)
        jobs.finish(disk / "to")
        compared = jobs.compared(disk / "to", **facts)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    stopped = process.returncode == 1 and "No space left on device" in facts["error"]
    return {**compared, "same": compared["same"] and stopped and 0 < facts["shards_when_full"] < jobs.shards}


def two_runs(jobs: Jobs) -> dict[str, Any]:
    to = jobs.folder / "two"
    first, second = jobs.start(to), jobs.start(to)
    await_shards(to, jobs.shards // 3, first)
    at = len(shards_in(to))
    killed = kill(first)
    _, errors = second.communicate(timeout=_RUN_S)
    compared = jobs.compared(to, shards_at_kill=at, exit_status=second.returncode, errors=errors.splitlines()[-2:])
    return {**compared, "same": compared["same"] and killed and second.returncode == 0}


def same_shard(jobs: Jobs) -> dict[str, Any]:
    to = jobs.folder / "one"
    options = ("--shard-images", str(jobs.images))
    runs = {jobs.start(to, *options) for _ in range(2)}
    holder = _holder(to, runs)
    time.sleep(2)
    killed = kill(holder)
    (other,) = runs - {holder}
    other.communicate(timeout=_RUN_S)
    compared = jobs.compared(to, exit_status=other.returncode)
    return {**compared, "same": compared["same"] and killed and other.returncode == 0}


def _holder(to: Path, runs: set[subprocess.Popen[str]]) -> subprocess.Popen[str]:
    """Wait until a run writes the shard, and return this run."""
    while all(run.poll() is None for run in runs):
        for staging in to.glob(".shard-*"):
            for run in runs:
                if any(_has_open(pid, staging) for pid in _session(run.pid)):
                    return run
        time.sleep(_POLL_S)
    raise SystemExit("a run ended before it wrote a shard")


def _session(leader: int) -> list[int]:
    answer = subprocess.run(["pgrep", "-s", str(leader)], capture_output=True, text=True, check=False)
    return [int(pid) for pid in answer.stdout.split()]


def _has_open(pid: int, path: Path) -> bool:
    try:
        return any(link.readlink() == path for link in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # the process or its descriptor is gone
        return False


def ray(jobs: Jobs) -> dict[str, Any]:
    to = jobs.folder / "ray"
    jobs.finish(to, "--launcher", "ray")
    return jobs.compared(to)


def problems(results: dict[str, Any], images: int) -> list[str]:
    """Return a sentence for each job whose rows are not those of the quiet run."""
    return [
        f"{name}: {job['rows']} rows, {job['distinct']} ids, {job['sha256'][:12]}…, expected {images} rows and the "
        f"quiet run's {results['jobs']['quiet']['sha256'][:12]}…"
        for name, job in results["jobs"].items()
        if not job["same"] or job["rows"] != images or job["distinct"] != images
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument(
        "--job", choices=JOBS, action="append", help="only this job after the quiet run; may be repeated"
    )
    parser.add_argument("--output", type=Path, default=result_of(__file__))
    arguments = parsed(parser, images=4 * SHARD_IMAGES, kills=1, job=["two runs"])
    cifar = dataset("cifar10")
    options = ExportOptions(mean=cifar.mean, std=cifar.std, labels=cifar.labels)
    with (
        tempfile.TemporaryDirectory() as temporary,
        run_card.written(
            arguments.output, "bulk_kills.py", timed=False, images=arguments.images, kills=arguments.kills
        ) as results,
    ):
        folder = Path(temporary)
        bundle = bundle_from_checkpoint(ROOT / "tests" / "golden" / "vit_gmm.pth", folder / "bundle", options)
        jobs = Jobs(bundle, write_images(folder / "images", arguments.images), folder, arguments.images)
        steps: dict[str, Callable[[], dict[str, Any]]] = {
            "quiet": lambda: quiet(jobs),
            "kills": lambda: kills(jobs, arguments.kills),
            "full disk": lambda: full_disk(jobs),
            "two runs": lambda: two_runs(jobs),
            "same shard": lambda: same_shard(jobs),
            "ray": lambda: ray(jobs),
        }
        results["shard_images"] = SHARD_IMAGES
        results["jobs"] = {}
        for name in ("quiet", *(arguments.job or JOBS)):
            results["jobs"][name] = steps[name]()
            print(name, results["jobs"][name], flush=True)
        results["problems"] = problems(results, arguments.images)
    if results["problems"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
