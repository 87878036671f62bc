"""Start or continue a job: classify every image of a source, each exactly once."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from gmmvit_deploy.arguments import require_counts, require_known
from gmmvit_deploy.bulk._local import classify_locally
from gmmvit_deploy.bulk._plan import kept_ends, read_plan, remove_rows, settled_plan, shard_name
from gmmvit_deploy.bulk._report import page_of, report_of
from gmmvit_deploy.bulk._shard import count_of_shard
from gmmvit_deploy.bulk._storage import Claims, Storage
from gmmvit_deploy.bulk.job import Job, require_bulk_runner, settings_of
from gmmvit_deploy.bulk.source import open_source
from gmmvit_deploy.bundle.artifacts import Bundle, open_bundle
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.extras import require
from gmmvit_deploy.images.data.files import LeftOutKind
from gmmvit_deploy.inference.cores import cores
from gmmvit_deploy.inference.runner_name import RunnerName
from gmmvit_deploy.progress import OnProgress, Progress, ignore
from gmmvit_deploy.runtimes.runners.chosen import choose_runner

Launcher = Literal["local", "ray"]
REPORT = "_report.html"
"""Readers of Parquet folders leave out names that begin with an underscore."""
INDEX_VARIABLE = "JOB_COMPLETION_INDEX"
"""The variable in which Kubernetes states the number of a pod of an Indexed Job, from 0 on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkResult:
    """What a run did.

    images, errors: of all shards of the part of this run; an image with an error has a row that states it.
    classified: images that this run classified, without those that were done before.
    complete: True if every shard of the whole job is done.
    left_out: the files, and the members of archives, of the whole source that are not images.
    notes: those of `choose_runner`, if this run chose the runner.
    """

    folder: str
    images: int
    errors: int
    classified: int
    seconds: float
    shards: int
    complete: bool
    left_out: tuple[LeftOutKind, ...]
    notes: tuple[str, ...]


def part_from(text: str) -> tuple[int, int]:
    """Parse ``3/8``, or ``JOB_COMPLETION_INDEX/8`` with the number in that variable: (index, count).

    Errors: InputError when the text has another form, or when the number is not below the count.
    """
    word, _, count = text.partition("/")
    index = os.environ.get(INDEX_VARIABLE, f"${INDEX_VARIABLE}, which is not set") if word == INDEX_VARIABLE else word
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise InputError(
            f"--shards {text}: expected I/N with 0 <= I < N, got I = {index or 'nothing'}, N = {count or 'nothing'}",
            hint=f"type for example --shards 0/8, or --shards {INDEX_VARIABLE}/8 in an Indexed Job of Kubernetes",
        )
    return int(index), int(count)


def classify_source(
    bundle: Bundle | Path | str,
    source: Path | str,
    folder: Path | str,
    *,
    runner: str | None = None,
    launcher: Launcher = "local",
    batch: int | None = None,
    shard_images: int = 5000,
    image_column: str | None = None,
    part: tuple[int, int] = (0, 1),
    workers: int | None = None,
    on_progress: OnProgress = ignore,
) -> BulkResult:
    """Classify the images of a source, and write a Parquet file for each shard.

    Example: ``classify_source("bundle", "photos/", "results").errors``.

    The same call continues an interrupted job: ``folder`` keeps the complete shards, and the rows of the others up to
    the last 30 seconds of work.
    source: a folder, file or pattern, as a path or a URL of fsspec.  folder: a path or a URL.
    runner: name and precision, such as ``openvino:bf16``; None for that of the folder's plan, else
    `choose_runner`.
    batch: images in a batch; None for the largest batch of the bundle.
    part: (index, count) of this run, which takes the shards index, index + count, index + 2 · count, …
    workers: processes on this machine, for the launcher ``local``; None for one a core, or one for a GPU.
    The run that finds every shard of the job complete writes the report, ``_report.html`` in the folder.
    Errors: InputError when the folder belongs to another source, bundle or settings, and for wrong input.
    OutputError when a shard cannot be written.  GmmvitError when a worker fails.
    """
    source, folder = str(source), str(folder)
    require_counts(batch=batch, shard_images=shard_images, workers=workers)
    require_known("launcher", launcher, get_args(Launcher))
    require("pyarrow", package="pyarrow", extra="bulk")
    if runner is not None:
        require_bulk_runner(runner)
    if launcher == "ray":
        require("ray", package="ray", extra="ray")
    opened = open_bundle(bundle)
    on_progress(Progress("list the source"))
    listed = open_source(source, column=image_column)
    storage = Storage(folder)
    existing = read_plan(storage) if runner is None else None  # a folder keeps its runner whatever is chosen meanwhile
    notes: tuple[str, ...] = ()
    if existing is not None:
        chosen = existing.settings.runner
    elif runner is not None:
        chosen = str(RunnerName.parse(runner))
    else:
        taken = choose_runner(opened)
        chosen, notes = str(taken.runner), taken.notes
    job = Job(
        bundle=opened.path.absolute(),
        source=listed,
        folder=folder,
        runner=chosen,
        batch=batch or opened.manifest.max_batch,
        shard_images=shard_images,
        decode_threads=1,
    )
    default_workers = cores()
    if job.on_gpu:  # a single process has the network, and its threads decode
        job, default_workers = replace(job, decode_threads=cores()), 1
    settings = settings_of(job, opened)
    storage.prepare()
    claims = Claims(storage)
    try:
        plan = settled_plan(storage, claims, listed, settings, on_progress=on_progress)
    finally:
        claims.close()
    job = replace(job, source=replace(listed, files=(), others=()))  # workers need no list of all files
    index, count = part
    selected = plan.shards[index::count]
    complete = storage.names()
    missing = [shard for shard in selected if shard_name(shard.number) not in complete]
    before = kept_ends(storage)
    for number in before:
        if shard_name(number) in complete:  # the process that wrote the shard was killed before it removed the rows
            remove_rows(storage, number)
    todo = sum(shard.images - before.get(shard.number, 0) for shard in missing)
    started = time.monotonic()
    rate = _Rate(sum(shard.images for shard in selected), todo, on_progress)
    if missing:
        try:
            if launcher == "ray":
                from gmmvit_deploy.bulk._ray_tasks import classify_with_ray

                classify_with_ray(job, missing, on_images=rate.add)
            else:
                classify_locally(job, missing, workers=workers or default_workers, on_images=rate.add)
        finally:
            storage.remove_leftovers()  # of workers that were ended while they wrote
    seconds = time.monotonic() - started
    complete = storage.names()
    whole = all(shard_name(shard.number) in complete for shard in plan.shards)
    if whole and (missing or REPORT not in complete):
        on_progress(Progress("write the report"))
        html = page_of(report_of(storage, plan), plan, name=opened.path.name)
        with storage.written(REPORT) as file:
            file.write(html.encode())
    counts = [count_of_shard(storage, shard.number) for shard in selected]
    return BulkResult(
        folder=folder,
        images=sum(rows for rows, _ in counts),
        errors=sum(errors for _, errors in counts),
        classified=todo,
        seconds=seconds,
        shards=len(selected),
        complete=whole,
        left_out=plan.left_out,
        notes=notes,
    )


def kept_images(folder: Path | str) -> tuple[int, int]:
    """Return (images whose rows a job's folder keeps, images of the job); (0, 0) before the job has a plan."""
    storage = Storage(str(folder))
    plan = read_plan(storage)
    if plan is None:
        return 0, 0
    complete, kept = storage.names(), kept_ends(storage)
    done = (s.images if shard_name(s.number) in complete else kept.get(s.number, 0) for s in plan.shards)
    return sum(done), plan.images


class _Rate:
    """Reports progress with the rate of this run."""

    def __init__(self, total: int, todo: int, on_progress: OnProgress) -> None:
        self._total = total
        self._before = self._done = total - todo
        self._on_progress = on_progress
        self._first_at: float | None = None
        self._report("")

    def add(self, images: int) -> None:
        now = time.monotonic()
        if self._first_at is None:  # the first batch waits for the start of the workers, and has no rate
            self._first_at, self._before = now, self._done + images
        self._done += images
        passed = now - self._first_at
        self._report(f"{(self._done - self._before) / passed:,.0f} images/s" if passed > 0 else "")

    def _report(self, rate: str) -> None:
        self._on_progress(Progress("classify", min(self._done, self._total), self._total, rate))
