"""Write metrics of this package in Prometheus's text format."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

__all__ = ["filesystem_metrics", "metric_text"]

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where Triton keeps its shared memory


def metric_text(name: str, kind: str, meaning: str, samples: Sequence[tuple[str, float]]) -> str:
    """Return the lines of a metric.  kind: ``gauge`` or ``counter``.  samples: (labels in braces or "", value)."""
    lines = [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}", *(f"{name}{labels} {n}" for labels, n in samples)]
    return "\n".join(lines) + "\n"


def filesystem_metrics(folders: Iterable[Path] = ()) -> str:
    """Return the free and the total bytes of the shared memory, the temporary folder and ``folders``.

    A folder that does not exist is left out.
    """
    free, size = [], []
    for folder in dict.fromkeys((_SHARED_MEMORY, Path(tempfile.gettempdir()), *folders)):
        try:
            state = os.statvfs(folder)
        except OSError:
            continue
        name = str(folder).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        free.append((f'{{folder="{name}"}}', state.f_bavail * state.f_frsize))
        size.append((f'{{folder="{name}"}}', state.f_blocks * state.f_frsize))
    return metric_text(
        "gmmvit_filesystem_free_bytes", "gauge", "Free bytes of the file system of a folder", free
    ) + metric_text("gmmvit_filesystem_size_bytes", "gauge", "Size in bytes of the file system of a folder", size)
