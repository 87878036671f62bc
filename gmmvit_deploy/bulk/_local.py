"""Launch worker processes on this machine, and give each a shard at a time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Pipe, wait
from typing import Any

from gmmvit_deploy.bulk._plan import ShardRecord
from gmmvit_deploy.bulk.job import Job
from gmmvit_deploy.errors import GmmvitError

_BEFORE_ASKING_AGAIN_S = 0.5
"""Time until a shard that another run has claimed is tried again."""
_STOP_S = 5.0


class _Worker:
    def __init__(self, job: Job) -> None:
        ours, theirs = Pipe(duplex=True)
        with theirs:
            command = [sys.executable, "-m", "gmmvit_deploy.bulk._worker", str(theirs.fileno())]
            # A thread a process: the libraries of the network must not start more.
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(
                command, pass_fds=(theirs.fileno(),), env=environment, stdin=subprocess.DEVNULL
            )
        self.connection: Any = ours
        self.shard: ShardRecord | None = None
        self.ready = False
        with suppress(BrokenPipeError, ConnectionResetError):  # a worker that ends at once is noticed when it is read
            ours.send(job)

    def give(self, shard: ShardRecord) -> None:
        self.shard = shard
        with suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(shard)

    def end(self) -> None:
        self.connection.close()
        self.process.terminate()
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def classify_locally(
    job: Job, shards: Sequence[ShardRecord], *, workers: int, on_images: Callable[[int], None]
) -> None:
    """Classify shards in worker processes.

    on_images: called with the number of images of each batch that is done.
    If another run has claimed a shard, this run waits until that run has written the shard or has ended.
    Errors: GmmvitError when a worker fails or is killed; the other workers are then ended.
    """
    todo = list(reversed(shards))
    held: list[ShardRecord] = []
    team = [_Worker(job) for _ in range(min(workers, len(shards)))]
    try:
        retry_at = 0.0
        while todo or held or any(worker.shard for worker in team):
            if held and time.monotonic() >= retry_at:
                todo[:0], held = held, []  # after all others
                retry_at = time.monotonic() + _BEFORE_ASKING_AGAIN_S
            for worker in team:
                if worker.ready and worker.shard is None and todo:
                    worker.give(todo.pop())
            waiting = wait([worker.connection for worker in team], timeout=_BEFORE_ASKING_AGAIN_S if held else None)
            for worker in team:
                if worker.connection in waiting:
                    held += _answered(worker, on_images)
    finally:
        for worker in team:
            worker.end()


def _answered(worker: _Worker, on_images: Callable[[int], None]) -> list[ShardRecord]:
    """Read a message of a worker.  Return the shard that another run holds, if the message says so."""
    try:
        kind, *values = worker.connection.recv()
    except (EOFError, ConnectionResetError) as exc:
        raise GmmvitError(_why_ended(worker.process), hint="type the same command again, with fewer --workers") from exc
    if kind == "failed":
        raise GmmvitError(values[0], hint=values[1])
    if kind == "images":
        on_images(values[0])
        return []
    worker.ready = True
    shard, worker.shard = worker.shard, None
    return [shard] if kind == "held" and shard is not None else []


def _why_ended(process: subprocess.Popen[bytes]) -> str:
    status = process.wait()
    how = f"by signal {signal.Signals(-status).name}" if status < 0 else f"with exit status {status}"
    more = "; the system may have run out of memory" if status == -signal.SIGKILL else ""
    return f"a worker process ended {how}{more}; complete shards are kept"
