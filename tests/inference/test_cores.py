"""Cores are the smaller of the affinity and the quota of the cgroup, in both versions of cgroups."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from gmmvit_deploy.inference import cores as counted
from gmmvit_deploy.inference.cores import allowed_processors, cores, cpu_quota, limit_libraries

V2 = "30 23 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup rw,nsdelegate"
V1 = "34 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"
PODS = "kubepods/burstable/pod1"


@pytest.fixture(autouse=True)
def _many_processors(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "real_group" not in request.fixturenames:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
        monkeypatch.setattr(os, "cpu_count", lambda: 64)


def machine(root: Path, groups: str, mounts: str, files: Mapping[str, str]) -> Path:
    """Write a folder with the files of /proc and /sys that state quotas."""
    stated = {
        "proc/self/cgroup": groups,
        "proc/self/mountinfo": mounts,
        **{f"sys/fs/cgroup/{k}": v for k, v in files.items()},
    }
    for name, text in stated.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


@pytest.mark.parametrize(
    ("stated", "quota", "expected"),
    [("max 100000", None, 64), ("200000 100000", 2.0, 2), ("150000 100000", 1.5, 1), ("", None, 64)],
)
def test_quota_of_version_2(stated: str, quota: float | None, expected: int, tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/app", V2, {"app/cpu.max": stated})
    assert cpu_quota(root) == quota
    assert cores(root) == expected


@pytest.mark.parametrize(
    ("stated", "quota", "expected"), [("-1", None, 64), ("250000", 2.5, 2), ("100000", 1.0, 1), ("1000", 0.01, 1)]
)
def test_quota_of_version_1(stated: str, quota: float | None, expected: int, tmp_path: Path) -> None:
    files = {"cpu,cpuacct/app/cpu.cfs_quota_us": stated, "cpu,cpuacct/app/cpu.cfs_period_us": "100000"}
    root = machine(tmp_path, "7:memory:/m\n4:cpu,cpuacct:/app\n1:name=systemd:/s", V1, files)
    assert cpu_quota(root) == quota
    assert cores(root) == expected


def test_smallest_quota_of_the_path_counts(tmp_path: Path) -> None:
    files = {
        "kubepods/cpu.max": "6000000 100000",
        "kubepods/burstable/cpu.max": "max 100000",
        f"{PODS}/cpu.max": "300000 100000",
        f"{PODS}/app/cpu.max": "400000 100000",
        f"{PODS}/other/cpu.max": "100000 100000",
    }
    root = machine(tmp_path, f"0::/{PODS}/app", V2, files)
    assert cpu_quota(root) == 3.0
    assert cores(root) == 3


def test_both_versions_at_once(tmp_path: Path) -> None:
    """A hybrid system mounts version 2 beside version 1, where the quota may stand in either."""
    mounts = f"{V1}\n41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
    files = {
        "cpu,cpuacct/app/cpu.cfs_quota_us": "500000",
        "cpu,cpuacct/app/cpu.cfs_period_us": "100000",
        "unified/slice/cpu.max": "400000 100000",
    }
    root = machine(tmp_path, "4:cpu,cpuacct:/app\n0::/slice/unit", mounts, files)
    assert cores(root) == 4


@pytest.mark.parametrize(
    ("path", "top"),
    [
        ("/docker/abc", "/docker/abc"),  # Docker without a namespace of its own: the mount shows the container's group
        ("/", "/"),  # with a namespace
    ],
)
def test_group_that_a_container_sees(path: str, top: str, tmp_path: Path) -> None:
    mount = f"30 23 0:26 {top} /sys/fs/cgroup ro - cgroup2 cgroup rw"
    root = machine(tmp_path, f"0::{path}", mount, {"cpu.max": "200000 100000"})
    assert cores(root) == 2


def test_machine_without_cgroups(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None
    assert cores(tmp_path) == 64


def test_libraries_learn_the_quota_unless_the_user_states_a_number(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/app", V2, {"app/cpu.max": "400000 100000"})
    environment = {"OMP_NUM_THREADS": "3"}
    limit_libraries(environment, root)
    assert environment == {"OMP_NUM_THREADS": "3", "OPENBLAS_NUM_THREADS": "4"}


@pytest.fixture
def real_group() -> Iterator[Path]:
    """A cgroup with a quota of a single core."""
    if len(allowed_processors()) < 2:
        pytest.skip("this process may use a single processor, so a quota of one core changes nothing")
    folder = next(iter(counted.groups(Path("/"))), None)
    if folder is None:
        pytest.skip("this machine has no cgroups for processors")
    group = folder / f"gmmvit-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as exc:
        pytest.skip(f"no cgroup can be made here: {exc}")
    try:
        if (group / "cpu.cfs_quota_us").exists():
            (group / "cpu.cfs_quota_us").write_text("100000")
        elif (group / "cpu.max").exists():
            (group / "cpu.max").write_text("100000 100000")
        else:
            pytest.skip(f"{folder} has no controller of processors for its groups")
        yield group
    finally:
        group.rmdir()


@pytest.mark.nightly
@pytest.mark.integration
def test_quota_of_a_real_group(real_group: Path) -> None:
    """A process in a group with a quota of one core uses a single thread, in every library."""
    code = """
import json, os
from gmmvit_deploy.inference.cores import cores, cpu_quota, is_limited, limit_libraries
from gmmvit_deploy.runtimes.runners.eager import limit_torch
import torch
before = torch.get_num_threads()
limit_torch()
from gmmvit_deploy.bench.machine import describe_machine
from gmmvit_deploy.inference.onnxruntime_program import session_options
limit_libraries(os.environ)
machine = describe_machine()
print(json.dumps({
    "cores": cores(), "quota": cpu_quota(), "limited": is_limited(), "torch": [before, torch.get_num_threads()],
    "card": [machine["cores_allowed"], machine["cpu_quota"]],
    "session": session_options(None).intra_op_num_threads,
    "variable": os.environ["OPENBLAS_NUM_THREADS"],
}))
"""
    entered = f'echo $$ > {real_group}/cgroup.procs && exec "$@"'
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    done = subprocess.run(
        ["sh", "-c", entered, "sh", sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    before, after = answer.pop("torch")
    assert (before > 1, after) == (True, 1)
    assert answer == {
        "cores": 1, "quota": 1.0, "limited": True, "card": [1, 1.0], "session": 1, "variable": "1"
    }  # fmt: skip
