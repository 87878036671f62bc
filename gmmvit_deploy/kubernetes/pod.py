"""The pod of a service: a container that runs ``gmmvit serve --gateway``, its probes, volumes and limits.

HAProxy and Triton run in the same container, because ``gmmvit serve`` watches both, restarts them, and ends them in the
order that loses no request. tini, as process 1, passes SIGTERM to ``gmmvit serve`` alone.
"""

from __future__ import annotations

from typing import Any

from gmmvit_deploy.kubernetes.options import ManifestOptions, ModelUri
from gmmvit_deploy.kubernetes.sizes import FILL_IN, Sizes
from gmmvit_deploy.kubernetes.timing import (
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
    "MODELS",
    "PORTS",
    "THREADS_ANNOTATION",
    "container",
    "fetch_container",
    "keys_secret",
    "model_volume",
    "models_path",
    "pod_security",
    "resources",
    "restricted",
    "stated_sizes",
    "store_access",
    "store_secret",
    "temporary",
    "tls_secret",
    "volumes",
]

CONTAINER = "server"
PORTS = {"http": 8000, "grpc": 8001, "metrics": 8002}
KEYS, _TLS = "/etc/gmmvit/keys", "/etc/gmmvit/tls"
BUNDLE_ANNOTATION = "gmmvit/bundle-sha256"
INSTANCES_ANNOTATION, THREADS_ANNOTATION = "gmmvit/instances", "gmmvit/threads"
MODELS = "/mnt/models"
_USER = 1000


def keys_secret(options: ManifestOptions) -> str:
    """Return the name of the Secret with keys.txt, the key file, and probe.key, the key of the probes."""
    return f"{options.name}-keys"


def tls_secret(options: ManifestOptions) -> str:
    """Return the name of the Secret of type kubernetes.io/tls."""
    return f"{options.name}-tls"


def stated_sizes(sizes: Sizes, bundle: str) -> dict[str, str]:
    """Return what people read: the bundle, and how the network uses the cores."""
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
    served = MODELS if options.style == "kserve" else models_path(options.model)
    server = [
        *("serve", served, "--gateway", "--listen", "0.0.0.0"),  # noqa: S104 - in the pod's own network
        *("--keys", f"{KEYS}/keys.txt"),
        *(("--tls-cert", f"{_TLS}/tls.crt", "--tls-key", f"{_TLS}/tls.key") if options.tls else ("--insecure",)),
        *("--max-body", str(options.max_body_bytes), "--start-timeout", str(START_TIMEOUT_S)),
        *("--in-flight", str(sizes.in_flight), "--queue-timeout", str(sizes.queue_timeout_ms)),
    ]
    mounts = [
        {"name": "shared-memory", "mountPath": "/dev/shm"},  # noqa: S108 - where Triton keeps its shared memory
        temporary()[1],
        {"name": "keys", "mountPath": KEYS, "readOnly": True},
        *([{"name": "tls", "mountPath": _TLS, "readOnly": True}] if options.tls else []),
        *([{"name": "model", "mountPath": MODELS, "readOnly": True}] if mounts_model else []),
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
        **restricted(),
        "volumeMounts": mounts,
    }


def restricted() -> dict[str, Any]:
    """Return the security context of a container."""
    context = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    return {"securityContext": context}


def temporary() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return volume and mount of the only folder of a container that is writable."""
    volume = {"name": "temporary", "emptyDir": {"sizeLimit": "1Gi"}}
    return volume, {"name": "temporary", "mountPath": "/tmp"}  # noqa: S108


def models_path(model: ModelUri) -> str:
    """Return the path of the model in a pod of plain Kubernetes."""
    if model.scheme == "oci":
        return f"{MODELS}/models"  # gmmvit pack writes below this folder of the image, where KServe looks as well
    return f"{MODELS}/{model.path}" if model.scheme == "pvc" and model.path else MODELS


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
        temporary()[0],
        *({"name": name, "secret": {"secretName": secret, "defaultMode": 0o440}} for name, secret in secrets.items()),
    ]


def model_volume(model: ModelUri) -> dict[str, Any]:
    """Return the volume of the model for plain Kubernetes; an oci image as a volume needs Kubernetes 1.33 or newer."""
    if model.scheme == "oci":
        return {"name": "model", "image": {"reference": model.place, "pullPolicy": "IfNotPresent"}}
    if model.scheme == "pvc":
        claim = {"claimName": model.place, "readOnly": True}
        return {"name": "model", "persistentVolumeClaim": claim}
    return {"name": "model", "emptyDir": {"sizeLimit": "10Gi"}}


def store_secret(name: str) -> str:
    """Return the name of the Secret with the credentials of the object store."""
    return f"{name}-store"


def store_access(name: str) -> dict[str, Any]:
    """Return where a container gets the variables of an object store.

    The Secret is optional, because a bucket can be public, or admit the nodes.
    """
    return {"envFrom": [{"secretRef": {"name": store_secret(name), "optional": True}}]}


def fetch_container(image: str, model: ModelUri, name: str) -> dict[str, Any]:
    """Return the container that copies the model from an object store before the pod's own container starts.

    name: of the objects.
    """
    limits = {"cpu": "1", "memory": "1Gi"}
    return {
        "name": "fetch-model",
        "image": image,
        "args": [str(model), MODELS],
        "env": [{"name": "HOME", "value": "/tmp"}],  # noqa: S108 - the only folder of the container that is writable
        **store_access(name),
        "resources": {"requests": dict(limits), "limits": limits},
        **restricted(),
        "volumeMounts": [{"name": "model", "mountPath": MODELS}, temporary()[1]],
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
