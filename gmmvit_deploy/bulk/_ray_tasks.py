"""Launch a Ray task for each shard.  Ray decides where and when a task runs, and repeats the tasks of lost workers."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

from gmmvit_deploy.bulk._plan import ShardRecord
from gmmvit_deploy.bulk.job import Job, OpenJob, Outcome
from gmmvit_deploy.errors import GmmvitError, InputError
from gmmvit_deploy.extras import require

_WAIT_S = 1.0


def classify_with_ray(job: Job, shards: Sequence[ShardRecord], *, on_images: Callable[[int], None]) -> None:
    """Classify shards as Ray tasks, each with a CPU, or with a GPU if the runner needs a GPU.

    The cluster is that of the variable RAY_ADDRESS, or a new one on this machine. Each of its machines must have this
    package, and must reach bundle, source and folder at the same paths.
    on_images: called with the number of images of each shard that is done.
    Errors: InputError when the cluster has no CPU or GPU for a task. GmmvitError when a task fails.
    """
    ray = require("ray", package="ray", extra="ray")
    ours = not ray.is_initialized()
    if ours:
        ray.init(log_to_driver=False, include_dashboard=False)
    try:
        _require_resources(ray, job)
        task = ray.remote(num_cpus=0 if job.on_gpu else 1, num_gpus=1 if job.on_gpu else 0, max_retries=5)(_classified)
        running = {task.remote(job, shard): shard for shard in shards}
        while running:
            ready, _ = ray.wait(list(running), timeout=_WAIT_S)
            for reference in ready:
                shard = running.pop(reference)
                if _outcome(ray, reference) == "held":
                    time.sleep(_WAIT_S)
                    running[task.remote(job, shard)] = shard
                else:
                    on_images(shard.images)
    finally:
        if ours:
            ray.shutdown()


def _require_resources(ray: Any, job: Job) -> None:
    """Refuse a cluster on which a task would wait forever without a message."""
    resource = "GPU" if job.on_gpu else "CPU"
    if ray.cluster_resources().get(resource, 0) < 1:
        raise InputError(
            f"--launcher ray: the cluster has no {resource}, which each shard needs",
            hint=f"start Ray with ray start --num-{resource.lower()}s N, or type another --runner",
        )


def _outcome(ray: Any, reference: Any) -> Outcome:
    try:
        outcome: Outcome = ray.get(reference)
    except ray.exceptions.RayTaskError as exc:
        cause = exc.cause
        if isinstance(cause, GmmvitError):
            raise GmmvitError(str(cause), hint=cause.hint) from exc
        raise GmmvitError(f"a Ray task failed: {type(cause).__name__}: {cause}") from exc
    except ray.exceptions.RayError as exc:
        raise GmmvitError(
            f"a Ray task was lost: {str(exc).splitlines()[0]}", hint="type the same command again; shards are kept"
        ) from exc
    return outcome


@functools.lru_cache(maxsize=1)
def _opened(job: Job) -> OpenJob:
    """Open the job once in each Ray worker; the worker keeps it for its next tasks."""
    return OpenJob(job)


def _classified(job: Job, shard: ShardRecord) -> Outcome:
    return _opened(job).classify(shard)
