"""The processes of a run: a single process, or the processes that torchrun starts, on CPUs or a GPU each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch import distributed as dist

from gmmvit_deploy.errors import InputError

Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """A process among the ``size`` processes of a run."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def first(self) -> bool:
        """True in the process that writes the files."""
        return self.rank == 0

    def total(self, values: Tensor) -> Tensor:
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()

    def shared(self, model: nn.Module, *, unused: bool) -> nn.Module:
        """Return a module whose gradients are averaged.  unused: True if some parameters get no gradient."""
        if self.size == 1:
            return model
        devices = [self.device.index] if self.device.type == "cuda" else None
        parallel: Any = nn.parallel.DistributedDataParallel
        wrapped: nn.Module = parallel(model, device_ids=devices, find_unused_parameters=unused)
        return wrapped


@contextmanager
def processes(device: Device) -> Iterator[Processes]:
    """Join the processes that torchrun started; without torchrun, the run has a single process.

    device: ``auto`` takes a GPU for each process if there is one, else the CPU.
    Errors: InputError when there is no GPU for a process.
    """
    size, local = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    gpus = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    if device == "cuda" and local >= gpus:
        raise InputError(
            f"--device cuda: expected a GPU for each process, PyTorch has {gpus} on this machine",
            hint="type --device cpu, or start fewer processes with torchrun",
        )
    place = torch.device("cuda", local) if local < gpus else torch.device("cpu")
    if size == 1:
        yield Processes(device=place)
        return
    if place.type == "cuda":
        torch.cuda.set_device(place)
    dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    try:
        yield Processes(rank=dist.get_rank(), size=size, device=place)
    finally:
        dist.destroy_process_group()
