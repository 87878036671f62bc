"""Rules for an Indexed Job of bulk work: parts, retries, cores, memory, and where the results are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gmmvit_deploy.manifests.checks.workload import Workload, mib_of, option_of, part, quantity

__all__ = ["JOB_RULES"]

_VARIABLE = "JOB_COMPLETION_INDEX"


def indexed(workload: Workload) -> Iterator[str]:
    if workload.job.get("completionMode") != "Indexed":
        yield f"expected completionMode: Indexed; without it, no pod knows its part, because {_VARIABLE} is not set"


def parts(workload: Workload) -> Iterator[str]:
    index, _, count = option_of(workload.arguments, "--shards").partition("/")
    completions, parallelism = workload.job.get("completions", 1), workload.job.get("parallelism", 1)
    if index != _VARIABLE:
        yield f"expected --shards {_VARIABLE}/{completions}, so that each pod does its own part"
    elif count != str(completions):
        yield f"--shards {index}/{count}, but completions is {completions}: parts would be missing or refused"
    if isinstance(parallelism, int) and isinstance(completions, int) and parallelism > completions:
        yield f"parallelism {parallelism} is more than the completions {completions}"


def restarts(workload: Workload) -> Iterator[str]:
    policy = workload.pod.get("restartPolicy")
    if policy != "Never":
        yield f"expected restartPolicy: Never, got {policy}: restarts inside a pod count as no failure of the index"


def retries(workload: Workload) -> Iterator[str]:
    tries, most = workload.job.get("backoffLimitPerIndex"), workload.job.get("maxFailedIndexes")
    if not isinstance(tries, int) or tries < 1:
        yield f"expected backoffLimitPerIndex of 1 at least, got {tries}: failures of a part would use up those of all"
    if not isinstance(most, int):
        yield "expected maxFailedIndexes: a wrong source fails for each index, again and again"


def disruption(workload: Workload) -> Iterator[str]:
    rules = part(workload.job, "podFailurePolicy", "rules") or []
    kinds = {
        condition.get("type")
        for rule in rules
        if rule.get("action") == "Ignore"
        for condition in rule.get("onPodConditions", [])
    }
    if "DisruptionTarget" not in kinds:
        yield "expected a podFailurePolicy that ignores DisruptionTarget: a drained node would count as a failure"


def broken_images(workload: Workload) -> Iterator[str]:
    if "--accept-broken" not in workload.arguments:
        yield "expected --accept-broken: a broken image is a row with its error, and would repeat the whole part"


def cores(workload: Workload) -> Iterator[str]:
    limits, requests = (part(workload.container, "resources", name) for name in ("limits", "requests"))
    cpu, workers = quantity(limits.get("cpu")), quantity(option_of(workload.arguments, "--workers"))
    if cpu is None:
        yield "expected a CPU limit"
    elif workers is None:
        yield "expected --workers, as many as the CPU limit"
    elif cpu != workers:
        yield f"the CPU limit is {limits.get('cpu')}, but --workers is {workers:g}; each worker keeps a core busy"
    if cpu is not None and quantity(requests.get("cpu")) != cpu:
        yield f"the CPU request {requests.get('cpu')} differs from the limit {limits.get('cpu')}"


def memory(workload: Workload) -> Iterator[str]:
    limits, requests = (part(workload.container, "resources", name) for name in ("limits", "requests"))
    if mib_of(limits.get("memory")) is None:
        yield f"expected a memory limit, got {limits.get('memory')}"
    elif mib_of(requests.get("memory")) != mib_of(limits.get("memory")):
        yield f"the memory request {requests.get('memory')} differs from the limit {limits.get('memory')}"


def results(workload: Workload) -> Iterator[str]:
    folder = option_of(workload.arguments, "--to")
    if "://" in folder:
        return
    volumes = {volume.get("name"): volume for volume in workload.pod.get("volumes", [])}
    for mount in workload.container.get("volumeMounts", []):
        path = str(mount.get("mountPath", "")).rstrip("/")
        if path and (folder == path or folder.startswith(f"{path}/")):
            yield from _unfit(mount, volumes.get(mount.get("name"), {}), folder)
            return
    yield f"--to {folder or '-'}: no volume is mounted there, and the root file system is read-only"


def _unfit(mount: Mapping[str, Any], volume: Mapping[str, Any], folder: str) -> Iterator[str]:
    if "emptyDir" in volume:
        yield f"--to {folder}: an emptyDir ends with the pod, and its results with it"
    if mount.get("readOnly") or part(volume, "persistentVolumeClaim", "readOnly"):
        yield f"--to {folder}: the volume is mounted read-only"


JOB_RULES: Mapping[str, Callable[[Workload], Iterator[str]]] = {
    "job-indexed": indexed,
    "job-parts": parts,
    "job-restarts": restarts,
    "job-retries": retries,
    "job-disruption": disruption,
    "job-broken-images": broken_images,
    "job-workers": cores,
    "job-memory": memory,
    "job-results": results,
}
"""Name → rule.  A rule yields a sentence for each problem."""
