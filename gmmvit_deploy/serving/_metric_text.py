"""The metrics of this package in Prometheus's text format: their lines, and those of all parts of a service."""

from __future__ import annotations

import http.client
import os
import re
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

RestartReason = Literal["exit", "worker", "probe"]

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where Triton keeps its shared memory


def metric_text(name: str, kind: str, meaning: str, samples: Sequence[tuple[str, float]]) -> str:
    """Return the lines of a metric.  kind: ``gauge`` or ``counter``.  samples: (labels in braces or "", value)."""
    lines = [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}", *(f"{name}{labels} {n}" for labels, n in samples)]
    return "\n".join(lines) + "\n"


def samples_in(text: str, name: str) -> list[tuple[dict[str, str], float]]:
    """Return (labels, value) of each sample of a metric, of which every sample has labels."""
    samples = []
    for labels, value in re.findall(rf"^{name}{{(.*)}} (\S+)$", text, re.MULTILINE):
        pairs = re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', labels)
        plain = {label: re.sub(r"\\(.)", lambda escape: escape[1].replace("n", "\n"), words) for label, words in pairs}
        samples.append((plain, float(value)))
    return samples


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


def joined_metrics(sources: Mapping[str, Callable[[], str]]) -> str:
    """Return the metrics of all sources that answer; ``gmmvit_metrics_source_up`` states which sources answered.

    sources: name of the source → function that returns its metrics, or raises OSError or HTTPException.
    """
    parts, states = [], []
    for name, source in sources.items():
        try:
            parts.append(source().rstrip("\n") + "\n")
        except (OSError, http.client.HTTPException):
            states.append((f'{{source="{name}"}}', 0))
        else:
            states.append((f'{{source="{name}"}}', 1))
    meaning = "1 if this part of the service answered with its metrics."
    return "".join(parts) + metric_text("gmmvit_metrics_source_up", "gauge", meaning, states)


class SupervisorMetrics:
    """Counters of the supervisor; threads may count at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._restarts: Counter[str] = Counter(dict.fromkeys(get_args(RestartReason), 0))
        self._failed_restarts = 0
        self._probes: Counter[tuple[str, str]] = Counter()
        self.up = False

    @property
    def restarts(self) -> int:
        return sum(self._restarts.values())

    def count_restart(self, reason: RestartReason) -> None:
        with self._lock:
            self._restarts[reason] += 1

    def count_failed_restart(self) -> None:
        with self._lock:
            self._failed_restarts += 1

    def count_probe(self, model: str, result: str) -> None:
        with self._lock:
            self._probes[model, result] += 1

    def text(self) -> str:
        """Return the metrics in Prometheus's text format."""
        with self._lock:
            restarts = [(f'{{reason="{reason}"}}', count) for reason, count in sorted(self._restarts.items())]
            probes = [
                (f'{{model="{model}",result="{result}"}}', count)
                for (model, result), count in sorted(self._probes.items())
            ]
        failed, late = [("", self._failed_restarts)], "Restarts after which the server was not ready"
        return (
            metric_text("gmmvit_server_up", "gauge", "1 if the server runs, else 0", [("", int(self.up))])
            + metric_text("gmmvit_server_restarts_total", "counter", "Restarts of the server", restarts)
            + metric_text("gmmvit_server_failed_restarts_total", "counter", late, failed)
            + metric_text("gmmvit_probes_total", "counter", "Inferences that the supervisor requested", probes)
        )
