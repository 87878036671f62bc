"""Whole runs: the rows are those of the network, and the same whatever was killed, full or doubled."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest

from gmmvit_deploy.bulk._local import classify_locally
from gmmvit_deploy.bulk._plan import read_plan
from gmmvit_deploy.bulk._report import BulkReport, page_of, report_of
from gmmvit_deploy.bulk._storage import JOB_FOLDER, Storage
from gmmvit_deploy.bulk.job import Job
from gmmvit_deploy.bulk.run import REPORT, classify_source
from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.errors import GmmvitError
from gmmvit_deploy.runtimes.runners.onnxruntime import OnnxRuntimeRunner
from tests.bulk.sources import MIXED, OTHERS, images, png, write_folder, write_tar
from tests.cli.terminal import Gmmvit, done, gmmvit_here
from tests.pages import require_readable_page
from tests.waiting import wait_until

COUNT, BROKEN, SHARD = 240, 101, 16
FILES = images(COUNT, broken=BROKEN)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("source") / "images", FILES)


@pytest.fixture(scope="module")
def quiet(source: Path, bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("quiet") / "to"
    result = classify_source(bundle.path, str(source), str(folder), runner="onnxruntime", shard_images=SHARD, workers=1)
    assert (result.images, result.errors, result.classified, result.complete) == (COUNT, 1, COUNT, True)
    return shards_in(folder)


def shards_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("shard-*.parquet"))}


def strangers_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith(("shard-", "_")))


def command(bundle: Bundle, source: Path, folder: Path, *options: str) -> list[str]:
    words = ["classify", "--bundle", str(bundle.path), "--from", str(source), "--to", str(folder)]
    options = ("--runner", "onnxruntime", "--shard-images", str(SHARD), "--accept-broken", *options)
    return [sys.executable, "-m", "gmmvit_cli.main", *words, *options]


def started(arguments: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)


def await_shards(folder: Path, count: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until a run has written ``count`` shards, and has begun the next."""
    enough = lambda: len(shards_in(folder)) >= count or process.poll() is not None  # noqa: E731
    wait_until(enough, f"{count} shards", within_s=120, poll_s=0.005)


def test_rows_are_those_of_the_network(quiet: dict[str, bytes], bundle: Bundle, tmp_path: Path) -> None:
    write_folder(tmp_path, quiet)
    table = parquet.read_table(tmp_path)
    assert table.column("id").to_pylist() == sorted(FILES)
    rows = table.to_pylist()
    (bad,) = [row for row in rows if row["error"]]
    assert bad["id"] == [*FILES][BROKEN]
    assert bad["error"] == "the file is not a JPEG, PNG, WEBP or BMP image"
    assert bad["label"] is bad["probability"] is bad["logits"] is None
    assert len(bad["sha256"]) == 64
    good = [row for row in rows if not row["error"]]
    pixels = np.stack([bundle.manifest.image.pixels_from_bytes(FILES[row["id"]]) for row in good])
    logits = OnnxRuntimeRunner(bundle).rows(bundle.inputs_from_pixels(pixels))
    np.testing.assert_allclose([row["logits"] for row in good], logits, atol=1e-4)
    labels = bundle.manifest.label_set
    for row, expected in zip(good, logits, strict=True):
        best = labels.predictions(expected, 1)[0]
        assert row["label"] == labels.names[best.index]
        assert row["probability"] == pytest.approx(best.probability, abs=1e-5)
        assert row["bundle_sha256"] == bundle.sha256


def test_command_line(quiet: dict[str, bytes], source: Path, bundle: Bundle, gmmvit: Gmmvit, tmp_path: Path) -> None:
    """Two workers, then again with nothing to do, then with a change that is refused."""
    words = command(bundle, source, tmp_path / "to")[3:]
    done(gmmvit(*words, "--workers", 2))
    assert shards_in(tmp_path / "to") == quiet
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "to").glob("shard-*")}
    words.remove("--accept-broken")
    for end in (4, 8):  # of a process that was killed before it removed them, and of another without locks
        (tmp_path / "to" / JOB_FOLDER / f"rows-00000-00000000-{end:08}.arrow").touch()
    again = gmmvit(*words)
    assert not list((tmp_path / "to").rglob("rows-*"))
    assert again.returncode == 1
    assert "0 classified by this run" in again.stderr
    assert "Error: 1 of 240 images is broken" in again.stderr
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "to").glob("shard-*")} == before
    assert strangers_in(tmp_path / "to") == []
    refused = gmmvit(*words, "--batch", 3)
    assert refused.returncode == 1
    assert "--batch: expected 8, got 3" in refused.stderr


@pytest.mark.nightly
def test_every_image_has_an_answer_and_other_files_are_named(bundle: Bundle, gmmvit: Gmmvit, tmp_path: Path) -> None:
    usable = {name: data for name, data in MIXED.items() if name not in ("j.jpg", "k")}
    write_folder(tmp_path / "mixed", usable | OTHERS)
    words = command(bundle, tmp_path / "mixed", tmp_path / "to", "--workers", "1", "--json")[3:]
    words.remove("--accept-broken")
    answer = done(gmmvit(*words))
    rows = parquet.read_table(tmp_path / "to").to_pylist()
    assert {row["id"]: row["error"] for row in rows} == dict.fromkeys(usable)
    result = json.loads(answer.out)
    assert (result["images"], result["errors"]) == (len(usable), 0)
    assert result["left_out"][0] == {"kind": ".txt", "files": 2, "first": "a.txt"}
    left_out = (
        "6 files were left out: 2 .txt (a.txt, …), 2 without a suffix (.DS_Store, …), 1 ._* (._a.PNG), "
        "1 .db (Thumbs.db)"
    )
    assert left_out in answer.err
    assert left_out in require_readable_page((tmp_path / "to" / REPORT).read_text(encoding="utf-8")).text


def test_parts_of_a_job_are_the_whole(
    quiet: dict[str, bytes], source: Path, bundle: Bundle, gmmvit: Gmmvit, tmp_path: Path
) -> None:
    words = command(bundle, source, tmp_path / "to", "--workers", "1", "--json")[3:]
    first, second = (gmmvit(*words, "--shards", f"{index}/2") for index in (1, 0))
    assert '"complete": false' in first.stdout
    assert '"complete": true' in second.stdout
    assert shards_in(tmp_path / "to") == quiet


@pytest.mark.nightly
@pytest.mark.integration
def test_killed_at_random_moments(quiet: dict[str, bytes], source: Path, bundle: Bundle, tmp_path: Path) -> None:
    moments = np.random.default_rng(24)
    folder = tmp_path / "to"
    killed = 0
    for _ in range(3):
        process = started(command(bundle, source, folder, "--workers", "2"))
        await_shards(folder, len(shards_in(folder)) + 1, process)
        time.sleep(moments.uniform(0, 0.05))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
        assert shards_in(folder).items() <= quiet.items()
        if status == 0:  # on a busy machine, a run may write its last shards before this process sees the first
            break
        assert status == -signal.SIGKILL
        killed += 1
    assert killed, "every run ended before it was killed"
    assert subprocess.run(command(bundle, source, folder), check=False, capture_output=True).returncode == 0
    assert shards_in(folder) == quiet
    assert strangers_in(folder) == []
    assert not list((folder / JOB_FOLDER).glob(".*"))


@pytest.mark.nightly
@pytest.mark.integration
def test_two_runs_of_which_one_is_killed(quiet: dict[str, bytes], source: Path, bundle: Bundle, tmp_path: Path) -> None:
    """Both work on the same folder. A parent is killed alone: its worker must end, and the other run must finish."""
    folder = tmp_path / "to"
    words = command(bundle, source, folder, "--workers", "1")
    killed, other = started(words), started(words)
    await_shards(folder, 2, killed)
    killed.kill()
    killed.wait()
    assert other.wait(120) == 0
    assert shards_in(folder) == quiet
    left = ["pgrep", "-s", str(killed.pid)]
    wait_until(lambda: subprocess.run(left, capture_output=True).returncode == 1, "the end of the worker", poll_s=0.1)


@pytest.mark.nightly
def test_a_worker_that_is_killed_is_reported(source: Path, bundle: Bundle, tmp_path: Path) -> None:
    killed = []

    def kill(_: Any) -> None:
        listing = ["pgrep", "-P", str(os.getpid()), "-f", "bulk._worker"]
        workers = subprocess.run(listing, capture_output=True, text=True, check=False)
        for pid in workers.stdout.split() if not killed else ():
            killed.append(int(pid))
            os.kill(int(pid), signal.SIGKILL)

    with pytest.raises(GmmvitError, match="a worker process ended by signal SIGKILL; the system may have run out of"):
        classify_source(bundle.path, str(source), str(tmp_path), shard_images=SHARD, workers=1, on_progress=kill)
    assert killed


@pytest.mark.nightly
@pytest.mark.integration
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk(quiet: dict[str, bytes], bundle: Bundle, source: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(disk)], check=False, capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"this machine cannot mount a small disk: {mounted.stderr}")
    try:
        folder = disk / "to"
        words = command(bundle, source, folder, "--workers", "2")
        answer = subprocess.run(words, check=False, capture_output=True, text=True)
        assert answer.returncode == 1
        assert "cannot be written: No space left on device; no partial output remains" in answer.stderr
        assert "hint: " in answer.stderr
        assert shards_in(folder).items() < quiet.items()
        assert strangers_in(folder) == []
        subprocess.run(["mount", "-o", "remount,size=10m", str(disk)], check=True)
        assert subprocess.run(words, check=False, capture_output=True).returncode == 0
        assert shards_in(folder) == quiet
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.nightly
def test_two_ray_workers(quiet: dict[str, bytes], source: Path, bundle: Bundle, tmp_path: Path) -> None:
    ray = pytest.importorskip("ray", reason="ray is not installed: the launcher ray is not tested")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        result = classify_source(
            bundle.path, str(source), str(tmp_path), runner="onnxruntime", shard_images=SHARD, launcher="ray"
        )
    finally:
        ray.shutdown()
    assert result.complete
    assert shards_in(tmp_path) == quiet


def test_ctrl_c_says_what_is_kept_and_what_to_type(
    source: Path, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    def interrupted(job: Job, shards: Any, **options: Any) -> None:
        classify_locally(job, shards[:2], **options)
        raise KeyboardInterrupt

    words = command(bundle, source, tmp_path, "--workers", "1")[3:]
    (tmp_path / JOB_FOLDER).mkdir()
    (tmp_path / JOB_FOLDER / "plan.json").write_text("damaged")
    for patched, by, state in (
        ("open_source", interrupt, ""),
        ("settled_plan", interrupt, ": nothing is kept yet"),
        ("classify_locally", interrupted, f": {tmp_path} keeps {2 * SHARD} of {COUNT} images"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(f"gmmvit_deploy.bulk.run.{patched}", by)
            answer = gmmvit_here(*words)
        assert answer.status == 130
        assert f"interrupted{state}; to continue, type the same command again" in " ".join(answer.err.split())
        (tmp_path / JOB_FOLDER / "plan.json").unlink(missing_ok=True)


def test_the_source_is_damaged_in_the_middle_of_a_run(bundle: Bundle, tmp_path: Path) -> None:
    """The error of a worker reaches the caller, and what was complete is kept."""
    archive = write_tar(tmp_path / "a.tar", images(40))

    def shorten(event: Any) -> None:
        if event.step == "classify":
            os.truncate(archive, 30_000)

    with pytest.raises(GmmvitError, match=r"a\.tar: the source was changed after the start of the job") as error:
        classify_source(bundle.path, str(archive), str(tmp_path / "to"), shard_images=8, workers=1, on_progress=shorten)
    assert "restore the source" in error.value.hint


# ---- the report on a job ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty images, one of them four times and one broken."""
    folder = tmp_path_factory.mktemp("report")
    copies = {f"copies/{n}.png": png(4) for n in range(3)}
    write_folder(folder / "source", {**images(30, broken=7), **copies})
    result = classify_source(bundle.path, str(folder / "source"), str(folder / "to"), shard_images=20, workers=1)
    assert result.complete
    return folder


def test_numbers_are_those_of_the_rows(results: Path) -> None:
    storage = Storage(str(results / "to"))
    plan = read_plan(storage)
    assert plan is not None
    report = report_of(storage, plan)
    rows = parquet.read_table(results / "to").to_pylist()
    good = [row for row in rows if row["error"] is None]
    assert (report.images, report.broken, report.duplicates) == (33, 1, 3)
    assert {label: count for label, (count, _) in report.classes.items()} == Counter(row["label"] for row in good)
    for label, (_, total) in report.classes.items():
        assert total == pytest.approx(sum(row["probability"] for row in good if row["label"] == label))
    assert sum(report.confidence) == len(good)
    assert report.errors == {"the file is not a JPEG, PNG, WEBP or BMP image": (1, "1/0007.png")}
    assert report.most_repeated == [["0/0004.png", "copies/0.png", "copies/1.png", "copies/2.png"]]


def test_the_page_can_be_read(results: Path) -> None:
    tree = require_readable_page((results / "to" / REPORT).read_text(encoding="utf-8"))
    text = tree.text
    assert "Verdict: ✗ 1 BROKEN IMAGE" in text
    assert "The network answered 32 of 33 images." in text
    assert "3 images with the content of another image." in text
    assert "copies/0.png, copies/1.png, copies/2.png" in text
    plan = read_plan(Storage(str(results / "to")))
    assert plan is not None
    for broken, verdict in ((0, "✓ COMPLETE"), (1, "? 1 BROKEN IMAGE"), (501, "✗ 501 BROKEN IMAGES")):
        page = require_readable_page(page_of(BulkReport(images=501, broken=broken), plan, name="bundle"))
        assert f"Verdict: {verdict}" in page.text
