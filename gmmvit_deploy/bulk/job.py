"""What a process needs to classify shards: the description of a job, and the opened job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gmmvit_deploy.bulk._plan import Settings, ShardRecord, read_plan, remove_rows, require_same, shard_name
from gmmvit_deploy.bulk._shard import ShardProgram
from gmmvit_deploy.bulk._storage import Claims, Storage
from gmmvit_deploy.bulk.source import Source
from gmmvit_deploy.bundle.artifacts import Bundle, open_bundle
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.images.resize_rules import STATE_PREPROCESSING
from gmmvit_deploy.inference.runner_name import RunnerName
from gmmvit_deploy.runtimes.runners.names import IN_PROCESS, runner_from

if TYPE_CHECKING:
    from gmmvit_deploy.runtimes.runners.runner import Runner

Outcome = Literal["done", "held"]
"""``done``: the file of the shard is complete.  ``held``: another process has claimed the shard."""
_OF_A_GPU = ("-gpu", "-cuda", "-tensorrt")
_RUNTIMES = {"onnxruntime": "onnxruntime", "openvino": "openvino", "eager": "torch", "compile": "torch"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The description of a job, which can be sent to another process.

    bundle: path of the bundle.  source, folder: paths or URLs.  runner: name and precision.
    """

    bundle: Path
    source: Source
    folder: str
    runner: str
    batch: int
    shard_images: int
    decode_threads: int

    @property
    def on_gpu(self) -> bool:
        """True if the runner computes on a GPU."""
        return RunnerName.parse(self.runner).name.endswith(_OF_A_GPU)


def require_bulk_runner(text: str) -> None:
    """Check the text of ``--runner``.  Errors: InputError when no runner of this name can classify in bulk."""
    name = runner_from(text).name
    if name not in IN_PROCESS:
        raise InputError(
            f"runner {name}: classification of a source runs the network in its own processes, without a server and "
            "without an engine's folder",
            hint=f"type --runner with one of {', '.join(IN_PROCESS)}",
        )


def settings_of(job: Job, bundle: Bundle) -> Settings:
    """Return what makes the rows of a job on this machine.

    Errors: InputError when images cannot be turned into inputs of the network, or when the batch is too large.
    """
    manifest = bundle.manifest
    if manifest.image.normalisation is None:
        raise InputError(
            f"{bundle.path}: the bundle has no mean and std, so images cannot be turned into inputs",
            hint=STATE_PREPROCESSING,
        )
    if job.batch > manifest.max_batch:
        raise InputError(
            f"batch: expected at most {manifest.max_batch}, the largest batch of {bundle.path}, got {job.batch}",
            hint=f"type --batch {manifest.max_batch}, or export the checkpoint again with a larger --max-batch",
        )
    name = RunnerName.parse(job.runner).runtime
    runtime = _RUNTIMES[name.partition("-")[0]]
    distribution = "onnxruntime-gpu" if runtime == "onnxruntime" and "-" in name else runtime
    return Settings(
        bundle_sha256=bundle.sha256,
        runner=job.runner,
        batch=job.batch,
        shard_images=job.shard_images,
        image_column=job.source.column,
        versions={package: version(package) for package in ("gmmvit-deploy", "numpy", "pillow", distribution)},
    )


class OpenJob:
    """A job that is open in this process: claims and classifies shards.  Used as a context manager."""

    def __init__(self, job: Job) -> None:
        """Open everything that shards of a job need.

        A runner on a CPU gets a single thread: a process for each core then shares decoding and network evenly, and
        the rows do not depend on the number of cores.
        Errors: those of the bundle and of the runner; InputError when this process would compute other rows than those
        of the plan.
        """
        self._storage = Storage(job.folder)
        bundle = open_bundle(job.bundle)
        plan = read_plan(self._storage)
        if plan is None:
            raise InputError(f"{job.folder}: expected the folder of a job", hint="type the same command again")
        require_same(plan, settings_of(job, bundle), what=job.folder)
        runner = open_bulk_runner(job.runner, bundle)
        self._program = ShardProgram(plan, job.source, self._storage, bundle, runner, decode_threads=job.decode_threads)
        self._claims = Claims(self._storage)

    def classify(self, shard: ShardRecord, on_images: Callable[[int], None] = lambda count: None) -> Outcome:
        """Classify a shard unless its file is complete, or another process has claimed it.

        on_images: called with the number of images of each batch that is done.
        Errors: those of `ShardProgram.write`.
        """
        if not self._claims.take(shard.number):
            return "held"
        try:
            while not self._storage.exists(shard_name(shard.number)):
                self._program.write(shard, on_images)
            remove_rows(self._storage, shard.number)
        finally:
            self._claims.release(shard.number)
        return "done"

    def close(self) -> None:
        self._program.close()
        self._claims.close()

    def __enter__(self) -> OpenJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_bulk_runner(text: str, bundle: Bundle) -> Runner:
    """Open the runner of a job, on a CPU with a single thread.  Errors: those of `open_runner`."""
    from gmmvit_deploy.runtimes.runners.open import open_runner

    if RunnerName.parse(text).name in ("eager", "compile"):
        import torch

        torch.set_num_threads(1)
    return open_runner(text, bundle, threads=1)
