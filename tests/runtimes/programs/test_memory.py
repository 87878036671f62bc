"""The available memory is the smaller of that of the machine and of the cgroups, in both versions of cgroups."""

from __future__ import annotations

from pathlib import Path

import pytest

from gmmvit_deploy.runtimes.programs.memory import available_bytes
from tests.inference.test_cores import V2, machine

V1 = "34 31 0:29 / /sys/fs/cgroup/memory rw shared:4 - cgroup cgroup rw,memory"
MACHINE = "MemTotal: 64000 kB\nMemAvailable:   8000 kB\nSwapTotal: 4000 kB\nSwapFree:  2000 kB"


@pytest.mark.parametrize(
    ("groups", "mounts", "files", "kib"),
    [
        ("0::/app", V2, {"app/memory.max": "max", "app/memory.current": "0"}, 10_000),
        ("0::/app", V2, {"app/memory.max": "4096000", "app/memory.current": "1024000"}, 3000),
        (
            "0::/app",
            V2,
            {"memory.max": "4096000", "memory.current": "2048000", "memory.stat": "anon 9\ninactive_file 1024000"},
            3000,
        ),
        (
            "4:memory:/app",
            V1,
            {"memory/app/memory.limit_in_bytes": "1024000", "memory/app/memory.usage_in_bytes": "512000"},
            500,
        ),
    ],
    ids=["no limit", "limit", "limit of a parent, with cached files", "version 1"],
)
def test_available_memory(groups: str, mounts: str, files: dict[str, str], kib: int, tmp_path: Path) -> None:
    root = machine(tmp_path, groups, mounts, files)
    (root / "proc/meminfo").write_text(MACHINE)
    assert available_bytes(root) == kib * 1024


def test_a_system_without_proc(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None
