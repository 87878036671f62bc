"""An Indexed Job that classifies a source in bulk: each index runs ``gmmvit classify --shards`` for its part.

The pods need no address and no order. They write only to the folder of the results, and a pod that is started again
does what is missing there, so Kubernetes restarts nothing inside a pod, and counts failures for each index.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.kubernetes.objects import egress_to_stores
from gmmvit_deploy.kubernetes.options import ModelUri, require_names, tag_warnings
from gmmvit_deploy.kubernetes.pod import (
    BUNDLE_ANNOTATION,
    MODELS,
    fetch_container,
    model_volume,
    models_path,
    pod_security,
    restricted,
    store_access,
    temporary,
)
from gmmvit_deploy.kubernetes.sizes import FILL_IN
from gmmvit_deploy.precision import precision_behind

__all__ = ["BULK_CONTAINER", "JOB_RUNNERS", "USAGE_ERROR", "JobOptions", "Place", "fill_in_job", "job_objects", "place"]

BULK_CONTAINER = "classify"
JOB_RUNNERS = ("onnxruntime", "openvino")
"""Runners whose packages are in the image for bulk work, which has no compiler, no PyTorch and no CUDA."""
USAGE_ERROR = 2
"""The exit status of gmmvit for options that it does not know: the same command fails for each index."""
_ATTEMPTS = 3
_MEMORY = re.compile(r"[1-9][0-9]*(Mi|Gi)")
_GRACE_S = 30
_SOURCE, _RESULTS = "/mnt/source", "/mnt/results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where images or results are.

    claim: a PersistentVolumeClaim, or "" for an object store.  path: below the claim, or the whole URL.
    """

    claim: str
    path: str

    def inside(self, folder: str) -> str:
        """Return the path or URL in a pod that mounts the claim at ``folder``."""
        return f"{folder}/{self.path}".rstrip("/") if self.claim else self.path


def place(text: str, option: str) -> Place:
    """Read ``pvc://CLAIM/PATH`` or ``s3://BUCKET/PATH``.  Errors: InputError."""
    scheme, _, rest = text.partition("://")
    if scheme not in ("pvc", "s3") or not rest.strip("/"):
        raise InputError(f"{option}: expected pvc://CLAIM/PATH or s3://BUCKET/PATH, got {text!r}")
    if scheme == "s3":
        return Place(claim="", path=text)
    claim, _, path = rest.partition("/")
    return Place(claim=claim, path=path.strip("/"))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """image: with the packages of ``docker/bulk``.  model: where the bundle is.
    source, results: ``--from`` and ``--to``.  parts: number of indexes, each a pod.
    workers: processes of a pod, each with a core.  memory: of a pod, as Kubernetes writes it; "" to fill it in.
    runner: name and precision.  more: further words for ``gmmvit classify``.
    name: all objects are called ``NAME-bulk``, so that no Service of the name selects the pods.
    fetch_image: as in `ManifestOptions`.
    Errors: InputError when a value is invalid.
    """

    image: str
    model: ModelUri
    source: Place
    results: Place
    parts: int
    workers: int = 1
    memory: str = ""
    runner: str = "onnxruntime"
    more: tuple[str, ...] = ()
    name: str = "gmmvit"
    fetch_image: str = ""

    @property
    def object_name(self) -> str:
        return f"{self.name}-bulk"

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user should know, a sentence each."""
        images = {"--image": self.image, "--fetch-image": self.fetch_image, "--model-uri": self.model.image}
        return tag_warnings(images)

    @property
    def uses_store(self) -> bool:
        """True if a pod opens connections to an object store."""
        return self.model.scheme == "s3" or not (self.source.claim and self.results.claim)

    def __post_init__(self) -> None:
        require_names({"--object-name": self.name})
        if self.model.scheme == "s3" and not self.fetch_image:
            raise InputError(
                "--model-uri s3://… in the style job needs --fetch-image, an image that copies the files",
                hint="KServe's storage-initializer is such an image: --fetch-image IMAGE@sha256:…",
            )
        if self.parts < 1 or self.workers < 1:
            raise InputError(f"expected --parts and --workers of 1 at least, got {self.parts} and {self.workers}")
        if self.memory and not _MEMORY.fullmatch(self.memory):
            raise InputError(f"--memory: expected a size such as 4Gi or 512Mi, got {self.memory!r}")
        name, _ = precision_behind(self.runner)
        if name not in JOB_RUNNERS:
            raise InputError(
                f"--runner {self.runner}: the image for bulk work has no compiler, no PyTorch and no CUDA",
                hint=f"type --runner with one of {', '.join(JOB_RUNNERS)}, and a precision behind it if you like",
            )


def job_objects(options: JobOptions, bundle: str) -> dict[str, dict[str, Any]]:
    """Return name of a file → the object in it.  bundle: the SHA-256 of the bundle."""
    return {"job.yaml": _job(options, bundle), "networkpolicy.yaml": _network_policy(options)}


def _labels(options: JobOptions) -> dict[str, str]:
    return {"app.kubernetes.io/name": options.object_name}


def _metadata(options: JobOptions) -> dict[str, Any]:
    return {"name": options.object_name, "labels": {**_labels(options), "app.kubernetes.io/managed-by": "gmmvit"}}


def _job(options: JobOptions, bundle: str) -> dict[str, Any]:
    security = pod_security()
    # OnRootMismatch: otherwise each start of a pod changes the group of millions of files.
    context = {**security["securityContext"], "fsGroupChangePolicy": "OnRootMismatch"}
    volumes, mounts = _storage(options)
    fetch = {"initContainers": [fetch_container(options.fetch_image, options.model, options.name)]}
    pod = {
        **security,
        "securityContext": context,
        "terminationGracePeriodSeconds": _GRACE_S,
        "restartPolicy": "Never",
        **(fetch if options.model.scheme == "s3" else {}),
        "containers": [_container(options, mounts)],
        "volumes": volumes,
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(options),
        "spec": {
            "completionMode": "Indexed",
            "completions": options.parts,
            "parallelism": options.parts,
            "backoffLimitPerIndex": _ATTEMPTS,
            # A wrong source or folder fails for each index, so the Job ends before every index has tried it.
            "maxFailedIndexes": max(1, options.parts // 10),
            "podFailurePolicy": {"rules": _failure_rules()},
            "template": {
                "metadata": {"labels": _labels(options), "annotations": {BUNDLE_ANNOTATION: bundle}},
                "spec": pod,
            },
        },
    }


def _failure_rules() -> list[dict[str, Any]]:
    """Return: a drained node is no failure of the index, and a wrong command line fails the whole Job."""
    codes = {"containerName": BULK_CONTAINER, "operator": "In", "values": [USAGE_ERROR]}
    return [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": codes},
    ]


def _container(options: JobOptions, mounts: list[dict[str, Any]]) -> dict[str, Any]:
    limits = {"cpu": str(options.workers), **({"memory": options.memory} if options.memory else {})}
    return {
        "name": BULK_CONTAINER,
        "image": options.image,
        "command": ["tini", "--", "gmmvit"],
        "args": [
            *("classify", "--bundle", models_path(options.model)),
            *("--from", options.source.inside(_SOURCE), "--to", options.results.inside(_RESULTS)),
            *("--shards", f"JOB_COMPLETION_INDEX/{options.parts}", "--accept-broken"),
            *("--workers", str(options.workers), "--runner", options.runner, *options.more),
        ],
        "env": [{"name": "TMPDIR", "value": "/tmp"}, {"name": "HOME", "value": "/tmp"}],  # noqa: S108
        **(store_access(options.name) if options.uses_store else {}),
        "resources": {"requests": dict(limits), "limits": limits},
        **restricted(),
        "volumeMounts": mounts,
    }


def _storage(options: JobOptions) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return volumes and mounts.  A claim that has several uses is a single volume of the pod."""
    volume, mount = temporary()
    volumes, mounts = [volume], [mount]
    model = model_volume(options.model)
    writable = options.results.claim
    owners: dict[str, str] = {}
    uses = [(options.source, "source", _SOURCE), (options.results, "results", _RESULTS)]
    if options.model.scheme == "pvc":
        uses = [(Place(claim=options.model.place, path=""), "model", MODELS), *uses]
    else:
        volumes.append(model)
        mounts.append({"name": "model", "mountPath": MODELS, "readOnly": True})
    for used, name, folder in uses:
        if not used.claim:
            continue
        if used.claim not in owners:
            owners[used.claim] = name
            read_only = {} if used.claim == writable else {"readOnly": True}
            volumes.append({"name": name, "persistentVolumeClaim": {"claimName": used.claim, **read_only}})
        read_only = {} if name == "results" else {"readOnly": True}
        mounts.append({"name": owners[used.claim], "mountPath": folder, **read_only})
    return volumes, mounts


def _network_policy(options: JobOptions) -> dict[str, Any]:
    """Return the policy: nobody reaches the pods, and they reach object stores only if they need one."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(options),
        "spec": {
            "podSelector": {"matchLabels": _labels(options)},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [],
            "egress": egress_to_stores() if options.uses_store else [],
        },
    }


def fill_in_job(options: JobOptions) -> dict[str, Any]:
    """Return the patch of the Job whose memory an operator must fill in."""
    resources = {"requests": {"memory": FILL_IN}, "limits": {"memory": FILL_IN}}
    pod = {"containers": [{"name": BULK_CONTAINER, "resources": resources}]}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": options.object_name},
        "spec": {"template": {"spec": pod}},
    }
