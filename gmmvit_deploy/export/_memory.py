"""Refuse an export that does not fit into the memory, before the work begins: the kernel would end it in the middle."""

from __future__ import annotations

from pathlib import Path

from gmmvit_deploy.checkpoints.reading import weights_bytes
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.runtimes.programs.memory import available_bytes

__all__ = ["require_memory"]

_GIB = 2**30
_COPIES = 4
"""The memory of an export in multiples of the weights, apart from the memory that every export takes."""
_EVERY_BYTES = _GIB // 2


def require_memory(checkpoint: Path, weights: str | None) -> None:
    """Check that an export fits into the memory.

    weights: as in `read_tensors`.
    Errors: InputError that states the needed and the available memory.
    """
    size, available = weights_bytes(checkpoint, weights), available_bytes()
    needed = _EVERY_BYTES + _COPIES * size
    if available is not None and available < needed:
        raise InputError(
            f"{checkpoint}: an export of {size / _GIB:.2f} GiB of weights takes about {needed / _GIB:.1f} GiB of "
            f"memory, and {available / _GIB:.1f} GiB are available",
            hint="end other programs, raise the memory limit of the container, or export on a machine with more "
            "memory; the bundle can be copied",
        )
