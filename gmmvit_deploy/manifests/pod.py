"""The pod of a service: a container that runs ``gmmvit serve --gateway``, its probes, volumes and limits.

HAProxy and Triton run in the same container, because ``gmmvit serve`` watches both, restarts them, and ends them in the
order that loses no request. tini, as process 1, passes SIGTERM to ``gmmvit serve`` alone.
"""

from __future__ import annotations

from typing import Any

from gmmvit_deploy.manifests.options import ManifestOptions
from gmmvit_deploy.manifests.sizes import FILL_IN, Sizes
from gmmvit_deploy.manifests.timing import (
    GRACE_S,
    LIVENESS,
    PRE_STOP_S,
    READINESS,
    START_TIMEOUT_S,
    STARTUP,
    ProbeTimes,
)

__all__ = [
    "BUNDLE_ANNOTATION",
    "CONTAINER",
    "INSTANCES_ANNOTATION",
    "KEYS",
    "PORTS",
    "THREADS_ANNOTATION",
    "container",
    "keys_secret",
    "pod_security",
    "resources",
    "stated_sizes",
    "tls_secret",
    "volumes",
]

CONTAINER = "server"
PORTS = {"http": 8000, "grpc": 8001, "metrics": 8002}
KEYS, _TLS = "/etc/gmmvit/keys", "/etc/gmmvit/tls"
BUNDLE_ANNOTATION = "gmmvit/bundle-sha256"
INSTANCES_ANNOTATION, THREADS_ANNOTATION = "gmmvit/instances", "gmmvit/threads"
_MODELS = "/mnt/models"
_USER = 1000


def keys_secret(options: ManifestOptions) -> str:
    """Return the name of the Secret with keys.txt, the key file, and probe.key, the key of the probes."""
    return f"{options.name}-keys"


def tls_secret(options: ManifestOptions) -> str:
    """Return the name of the Secret of type kubernetes.io/tls."""
    return f"{options.name}-tls"


def stated_sizes(sizes: Sizes, bundle: str) -> dict[str, str]:
    """Return what the checks and people read: the bundle, and how the network uses the cores."""
    stated = {INSTANCES_ANNOTATION: sizes.instances, THREADS_ANNOTATION: sizes.threads} if sizes.known else {}
    return {BUNDLE_ANNOTATION: bundle, **stated}


def resources(sizes: Sizes, gpus: int) -> dict[str, Any]:
    """Return requests that equal the limits, so that the kernel kills other pods first."""
    limits: dict[str, Any] = {"cpu": sizes.cpu, "memory": sizes.memory}
    if gpus:
        limits["nvidia.com/gpu"] = str(gpus)
    return {"requests": dict(limits), "limits": limits}


def container(
    options: ManifestOptions, sizes: Sizes, *, name: str, bundle: str, probed: str, mounts_model: bool
) -> dict[str, Any]:
    """Return the container.

    bundle: the SHA-256 of the bundle that must answer.  probed: the model that the probes ask.
    mounts_model: False if KServe mounts the model.
    """
    server = [
        *("serve", _models_path(options), "--gateway", "--listen", "0.0.0.0"),  # noqa: S104 - in the pod's own network
        *("--keys", f"{KEYS}/keys.txt"),
        *(("--tls-cert", f"{_TLS}/tls.crt", "--tls-key", f"{_TLS}/tls.key") if options.tls else ("--insecure",)),
        *("--max-body", str(options.max_body_bytes), "--start-timeout", str(START_TIMEOUT_S)),
        *("--in-flight", str(sizes.in_flight), "--queue-timeout", str(sizes.queue_timeout_ms)),
    ]
    mounts = [
        {"name": "shared-memory", "mountPath": "/dev/shm"},  # noqa: S108 - where Triton keeps its shared memory
        {"name": "temporary", "mountPath": "/tmp"},  # noqa: S108 - the only folder of the container that is writable
        {"name": "keys", "mountPath": KEYS, "readOnly": True},
        *([{"name": "tls", "mountPath": _TLS, "readOnly": True}] if options.tls else []),
        *([{"name": "model", "mountPath": _MODELS, "readOnly": True}] if mounts_model else []),
    ]
    tls = ["--tls"] if options.tls else []
    infer = ["infer", *tls, "--key-file", f"{KEYS}/probe.key", "--model", probed, "--bundle", bundle]
    return {
        "name": name,
        "image": options.image,
        "command": ["tini", "--", "gmmvit"],
        "args": server,
        "env": [{"name": "TMPDIR", "value": "/tmp"}, {"name": "HOME", "value": "/tmp"}],  # noqa: S108
        "ports": [{"name": service, "containerPort": port} for service, port in PORTS.items()],
        **({"resources": resources(sizes, options.gpus)} if sizes.known else {}),
        "startupProbe": _probe(["ready", *tls], STARTUP),
        "readinessProbe": _probe(infer, READINESS),
        "livenessProbe": _probe(infer, LIVENESS),
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(PRE_STOP_S)]}}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }


def _models_path(options: ManifestOptions) -> str:
    if options.style == "kserve":
        return _MODELS
    if options.model.scheme == "oci":
        return f"{_MODELS}/models"  # gmmvit pack writes below this folder of the image, where KServe looks as well
    return f"{_MODELS}/{options.model.path}" if options.model.scheme == "pvc" and options.model.path else _MODELS


def _probe(arguments: list[str], times: ProbeTimes) -> dict[str, Any]:
    command = ["python", "-m", "gmmvit_deploy.serving.pod_probe", *arguments, "--timeout", str(times.request_s)]
    return {
        "exec": {"command": command},
        "periodSeconds": times.period_s,
        "timeoutSeconds": times.timeout_s,
        "failureThreshold": times.failures,
    }


def volumes(options: ManifestOptions, sizes: Sizes) -> list[dict[str, Any]]:
    """Return the volumes of the pod without that of the model."""
    secrets = {"keys": keys_secret(options), **({"tls": tls_secret(options)} if options.tls else {})}
    return [
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": f"{sizes.shm_mib}Mi"}},
        {"name": "temporary", "emptyDir": {"sizeLimit": "1Gi"}},
        *({"name": name, "secret": {"secretName": secret, "defaultMode": 0o440}} for name, secret in secrets.items()),
    ]


def model_volume(options: ManifestOptions) -> dict[str, Any]:
    """Return the volume of the model for plain Kubernetes; an oci image as a volume needs Kubernetes 1.33 or newer."""
    if options.model.scheme == "oci":
        return {"name": "model", "image": {"reference": options.model.place, "pullPolicy": "IfNotPresent"}}
    if options.model.scheme == "pvc":
        claim = {"claimName": options.model.place, "readOnly": True}
        return {"name": "model", "persistentVolumeClaim": claim}
    return {"name": "model", "emptyDir": {"sizeLimit": "10Gi"}}


def fetch_container(options: ManifestOptions) -> dict[str, Any]:
    """Return the container that copies the model from an object store before the server starts."""
    limits = {"cpu": "1", "memory": "1Gi"}
    return {
        "name": "fetch-model",
        "image": options.fetch_image,
        "args": [str(options.model), _MODELS],
        "env": [{"name": "HOME", "value": "/tmp"}],  # noqa: S108 - the only folder of the container that is writable
        "resources": {"requests": dict(limits), "limits": limits},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "model", "mountPath": _MODELS},
            {"name": "temporary", "mountPath": "/tmp"},  # noqa: S108
        ],
    }


def pod_security() -> dict[str, Any]:
    """Return the security context of the pod, and what goes with it."""
    return {
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "terminationGracePeriodSeconds": GRACE_S,
    }


def fill_in_patch(name: str) -> dict[str, Any]:
    """Return the patch of a Deployment whose values an operator must fill in."""
    quantities = {"cpu": FILL_IN, "memory": FILL_IN}
    stated = {INSTANCES_ANNOTATION: FILL_IN, THREADS_ANNOTATION: FILL_IN}
    sized = [{"name": CONTAINER, "resources": {"requests": dict(quantities), "limits": quantities}}]
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {"template": {"metadata": {"annotations": stated}, "spec": {"containers": sized}}},
    }
