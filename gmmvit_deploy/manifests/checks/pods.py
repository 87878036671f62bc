"""Rules for the pod: probes, end, memory, cores, rights.  Each yields a sentence for each problem."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gmmvit_deploy.manifests.checks.workload import Workload, mib_of, option_of, part, quantity
from gmmvit_deploy.manifests.options import PINNED
from gmmvit_deploy.manifests.pod import BUNDLE_ANNOTATION, INSTANCES_ANNOTATION, THREADS_ANNOTATION
from gmmvit_deploy.manifests.timing import EXIT_S, RESTART_S

__all__ = ["POD_RULES"]

_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - where Triton keeps its shared memory
_TEMPORARY = "/tmp"  # noqa: S108
_BESIDE_MIB = 256
_MIB = 2**20
_SECRET = re.compile(r"key|token|secret|password", re.IGNORECASE)


def _number(value: object, default: int) -> int:
    return value if isinstance(value, int) else default


def _command(probe: Mapping[str, Any]) -> list[str]:
    return [str(word) for word in part(probe, "exec", "command") or []]


def _probes(workload: Workload) -> dict[str, Mapping[str, Any]]:
    return {name: part(workload.container, name) for name in ("livenessProbe", "readinessProbe")}


def probes_infer(workload: Workload) -> Iterator[str]:
    for name, probe in _probes(workload).items():
        command = _command(probe)
        if "gmmvit_deploy.serving.pod_probe" not in command or "infer" not in command:
            path = part(probe, "httpGet", "path")
            seen = f"httpGet {path}, which stays 200 when the worker of the network has died" if path else "none"
            yield f"{name}: expected the command pod_probe infer, got {seen if not command else ' '.join(command)}"


def probe_timeouts(workload: Workload) -> Iterator[str]:
    for name, probe in {**_probes(workload), "startupProbe": part(workload.container, "startupProbe")}.items():
        command = _command(probe)
        if not command:
            continue
        request_s = float(option_of(command, "--timeout") or 2)
        requests = 3 if "infer" in command else 1
        if _number(probe.get("timeoutSeconds"), 1) <= requests * request_s:
            yield (
                f"{name}: timeoutSeconds {probe.get('timeoutSeconds', 1)} ends the command before its {requests} "
                f"request(s) of {request_s:g} s"
            )


def startup_probe(workload: Workload) -> Iterator[str]:
    probe = part(workload.container, "startupProbe")
    limit_s = float(option_of(workload.arguments, "--start-timeout") or 120)
    budget_s = _number(probe.get("periodSeconds"), 10) * _number(probe.get("failureThreshold"), 3)
    if not probe:
        yield "expected a startupProbe: without it, the liveness probe ends a server that still loads its models"
    elif budget_s < limit_s:
        yield f"gives up after {budget_s} s, before --start-timeout of {limit_s:g} s"


def liveness_patience(workload: Workload) -> Iterator[str]:
    probe = part(workload.container, "livenessProbe")
    patience_s = _number(probe.get("periodSeconds"), 10) * _number(probe.get("failureThreshold"), 3)
    if probe and patience_s < RESTART_S:
        yield f"ends the pod after {patience_s} s, while the supervisor may need {RESTART_S} s to restart the server"


def probe_bundle(workload: Workload) -> Iterator[str]:
    stated = workload.annotations.get(BUNDLE_ANNOTATION)
    for name, probe in _probes(workload).items():
        asked = option_of(_command(probe), "--bundle")
        if _command(probe) and stated and asked != stated:
            yield f"{name}: asks for the bundle {asked[:16] or '-'}, but {BUNDLE_ANNOTATION} is {str(stated)[:16]}"


def shared_memory(workload: Workload) -> Iterator[str]:
    volume = _volume_at(workload, _SHARED_MEMORY)
    if volume is None:
        yield f"expected a volume at {_SHARED_MEMORY}; containers have 64 MB there, and Triton needs more"
        return
    empty = part(volume, "emptyDir")
    if empty.get("medium") != "Memory":
        yield f"{_SHARED_MEMORY}: expected an emptyDir with medium Memory, got {volume}"
    size_mib = mib_of(empty.get("sizeLimit"))
    needed = _shm_needed_mib(workload)
    if size_mib is None:
        yield f"{_SHARED_MEMORY}: expected a sizeLimit"
    elif size_mib < needed:
        yield f"{_SHARED_MEMORY}: {size_mib:g} MiB, but 2 · --in-flight · --max-body is {needed:g} MiB"


def _shm_needed_mib(workload: Workload) -> float:
    in_flight = int(option_of(workload.arguments, "--in-flight") or 16)
    return 2 * in_flight * int(option_of(workload.arguments, "--max-body") or 16 * _MIB) / _MIB


def _volume_at(workload: Workload, path: str) -> Mapping[str, Any] | None:
    mounts = {mount.get("mountPath"): mount for mount in workload.container.get("volumeMounts", [])}
    volumes = {volume.get("name"): volume for volume in workload.pod.get("volumes", [])}
    mount = mounts.get(path)
    return None if mount is None or mount.get("readOnly") else volumes.get(mount.get("name"))


def pre_stop(workload: Workload) -> Iterator[str]:
    if _pre_stop_s(workload) < 5:
        yield "expected preStop: sleep of 5 s at least; load balancers send requests to a pod for seconds after SIGTERM"


def _pre_stop_s(workload: Workload) -> int:
    hook = part(workload.container, "lifecycle", "preStop")
    command = _command(hook)
    if len(command) == 2 and command[0] == "sleep" and command[1].isdigit():
        return int(command[1])
    return _number(part(hook, "sleep", "seconds"), 0)


def grace_period(workload: Workload) -> Iterator[str]:
    grace_s = _number(workload.pod.get("terminationGracePeriodSeconds"), 30)
    needed_s = _pre_stop_s(workload) + EXIT_S
    if grace_s <= needed_s:
        yield f"terminationGracePeriodSeconds {grace_s}: preStop and the end of the server take {needed_s} s"


def cores(workload: Workload) -> Iterator[str]:
    limits, requests = (part(workload.container, "resources", name) for name in ("limits", "requests"))
    cpu = quantity(limits.get("cpu"))
    stated = [quantity(workload.annotations.get(name)) for name in (INSTANCES_ANNOTATION, THREADS_ANNOTATION)]
    if cpu is None:
        yield "expected a CPU limit"
        return
    if quantity(requests.get("cpu")) != cpu:
        yield f"the CPU request {requests.get('cpu')} differs from the limit {limits.get('cpu')}"
    if stated[0] is None or stated[1] is None:
        yield f"expected the annotations {INSTANCES_ANNOTATION} and {THREADS_ANNOTATION}"
        return
    needed = stated[0] * stated[1] + 1
    if cpu != needed:
        yield (
            f"the CPU limit is {limits.get('cpu')}, but {stated[0]:g} instances with {stated[1]:g} threads and the "
            f"gateway use {needed:g} cores"
        )


def memory(workload: Workload) -> Iterator[str]:
    limits, requests = (part(workload.container, "resources", name) for name in ("limits", "requests"))
    limit_mib = mib_of(limits.get("memory"))
    least = _shm_needed_mib(workload) + _BESIDE_MIB
    if limit_mib is None:
        yield "expected a memory limit"
    elif limit_mib <= least:
        yield f"the memory limit is {limit_mib:g} MiB; {_SHARED_MEMORY} and the gateway alone need {least:g} MiB"
    elif mib_of(requests.get("memory")) != limit_mib:
        yield f"the memory request {requests.get('memory')} differs from the limit {limits.get('memory')}"


def not_root(workload: Workload) -> Iterator[str]:
    pod, own = part(workload.pod, "securityContext"), part(workload.container, "securityContext")
    both = {**pod, **own}
    if both.get("runAsNonRoot") is not True:
        yield "expected runAsNonRoot: true"
    if both.get("runAsUser") == 0:
        yield "runs as user 0"


def rights(workload: Workload) -> Iterator[str]:
    own = part(workload.container, "securityContext")
    if own.get("privileged") or own.get("allowPrivilegeEscalation") is not False:
        yield "expected allowPrivilegeEscalation: false, and no privileged container"
    if "ALL" not in (part(own, "capabilities", "drop") or []) or part(own, "capabilities", "add"):
        yield "expected capabilities: drop ALL"
    if workload.pod.get("automountServiceAccountToken") is not False:
        yield "expected automountServiceAccountToken: false: nothing in the pod uses the API of Kubernetes"


def read_only_root(workload: Workload) -> Iterator[str]:
    if part(workload.container, "securityContext").get("readOnlyRootFilesystem") is not True:
        yield "expected readOnlyRootFilesystem: true"


def temporary_folder(workload: Workload) -> Iterator[str]:
    if "emptyDir" not in (_volume_at(workload, _TEMPORARY) or {}):
        yield f"expected a writable emptyDir at {_TEMPORARY}, where gmmvit writes temporary files"


def image_digest(workload: Workload) -> Iterator[str]:
    containers = [workload.container, *workload.pod.get("initContainers", [])]
    images = [str(each.get("image", "")) for each in containers]
    images += [str(part(each, "image", "reference")) for each in workload.pod.get("volumes", []) if "image" in each]
    scheme, _, place = workload.model_uri.partition("://")
    if scheme in ("oci", "oci+native"):
        images.append(place)
    for image in images:
        if not PINNED.fullmatch(image):
            yield f"{image or '-'}: expected an image with its digest, …@sha256:…; a tag can change"


def gateway(workload: Workload) -> Iterator[str]:
    words = workload.arguments
    if "--gateway" not in words or not option_of(words, "--keys"):
        yield "expected gmmvit serve --gateway --keys FILE: without the gateway, a request of 277 bytes ends the server"
    if workload.tls and (not option_of(words, "--tls-cert") or "--insecure" in words):
        yield "expected --tls-cert, and no --insecure: keys would cross the cluster's network in plain text"


def key_in_plain_text(workload: Workload) -> Iterator[str]:
    for entry in workload.container.get("env", []):
        if _SECRET.search(str(entry.get("name", ""))) and entry.get("value"):
            yield f"env {entry['name']}: a value in plain text; mount a Secret"
    volumes = {volume.get("name"): volume for volume in workload.pod.get("volumes", [])}
    for mount in workload.container.get("volumeMounts", []):
        if _SECRET.search(str(mount.get("mountPath", ""))) and "secret" not in volumes.get(mount.get("name"), {}):
            yield f"{mount.get('mountPath')}: expected a volume of a Secret, got {volumes.get(mount.get('name'))}"


POD_RULES: Mapping[str, Callable[[Workload], Iterator[str]]] = {
    "probe-infers": probes_infer,
    "probe-timeout": probe_timeouts,
    "probe-bundle": probe_bundle,
    "startup-probe": startup_probe,
    "liveness-patience": liveness_patience,
    "shared-memory": shared_memory,
    "pre-stop": pre_stop,
    "grace-period": grace_period,
    "cpu-threads": cores,
    "memory": memory,
    "not-root": not_root,
    "rights": rights,
    "read-only-root": read_only_root,
    "temporary-folder": temporary_folder,
    "image-digest": image_digest,
    "gateway": gateway,
    "plain-text-key": key_in_plain_text,
}
"""Name → rule.  A rule yields a sentence for each problem."""
