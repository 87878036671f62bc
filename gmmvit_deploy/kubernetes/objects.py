"""The objects around the pod, each a plain dict in the order in which it is written."""

from __future__ import annotations

from typing import Any

from gmmvit_deploy.kubernetes.options import ManifestOptions
from gmmvit_deploy.kubernetes.pod import (
    CONTAINER,
    PORTS,
    container,
    fetch_container,
    keys_secret,
    model_volume,
    pod_security,
    stated_sizes,
    store_secret,
    tls_secret,
    volumes,
)
from gmmvit_deploy.kubernetes.sizes import Sizes

__all__ = ["CLIENT_LABEL", "autoscaler", "deployment", "disruption_budget", "network_policy", "selector", "service"]

CLIENT_LABEL = "gmmvit-client"
QUEUE_METRIC = "gmmvit_queue_seconds"
"""The time that a request waits in the gateway and in Triton, in seconds, which `monitoring.queue_rule` records."""
_NAMESPACE = "kubernetes.io/metadata.name"


def selector(options: ManifestOptions) -> dict[str, str]:
    """Return the labels that select the pods; KServe puts its own label on the pods that it makes."""
    if options.style == "kserve":
        return {"serving.kserve.io/inferenceservice": options.name}
    return {"app.kubernetes.io/name": options.name}


def labels(options: ManifestOptions) -> dict[str, str]:
    return {"app.kubernetes.io/name": options.name, "app.kubernetes.io/managed-by": "gmmvit"}


def named(options: ManifestOptions, suffix: str = "") -> dict[str, Any]:
    return {"name": f"{options.name}{suffix}", "labels": labels(options)}


def deployment(options: ManifestOptions, sizes: Sizes, *, bundle: str, probed: str) -> dict[str, Any]:
    """Return the Deployment.  Without ``replicas``: the HorizontalPodAutoscaler sets their number."""
    server = container(options, sizes, name=CONTAINER, bundle=bundle, probed=probed, mounts_model=True)
    fetch = (
        {"initContainers": [fetch_container(options.fetch_image, options.model, options.name)]}
        if options.model.scheme == "s3"
        else {}
    )
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": selector(options)},
    }
    pod = {
        **pod_security(),
        **fetch,
        "containers": [server],
        "volumes": [*volumes(options, sizes), model_volume(options.model)],
        "topologySpreadConstraints": [spread],
    }
    template = {"metadata": {"labels": selector(options), "annotations": stated_sizes(sizes, bundle)}, "spec": pod}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": named(options),
        "spec": {
            "selector": {"matchLabels": selector(options)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": template,
        },
    }


def service(options: ManifestOptions) -> dict[str, Any]:
    """Return the Service of the clients.  A gRPC client keeps its connection, and so its pod: see the page."""
    ports = [{"name": name, "port": port, "targetPort": name} for name, port in PORTS.items() if name != "metrics"]
    spec = {"selector": selector(options), "ports": ports}
    return {"apiVersion": "v1", "kind": "Service", "metadata": named(options), "spec": spec}


def metrics_service(options: ManifestOptions) -> dict[str, Any]:
    """Return a Service for Prometheus, apart from that of the clients."""
    metadata = named(options, "-metrics")
    metadata["labels"] = {**metadata["labels"], "gmmvit-metrics": options.name}
    ports = [{"name": "metrics", "port": PORTS["metrics"], "targetPort": PORTS["metrics"]}]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {"clusterIP": "None", "selector": selector(options), "ports": ports},
    }


def disruption_budget(options: ManifestOptions) -> dict[str, Any]:
    """Return the budget: a drained node takes a single pod at a time."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": named(options),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": selector(options)}},
    }


def network_policy(options: ManifestOptions) -> dict[str, Any]:
    """Return the policy: clients reach the gateway's two ports, Prometheus the third, and the pod calls nobody.

    With a model in an object store, the pod may ask for names and open connections to port 443.
    """
    peer: dict[str, Any] = {"podSelector": {"matchLabels": {CLIENT_LABEL: "true"}}}
    if options.clients:
        peer = {"namespaceSelector": {"matchLabels": {_NAMESPACE: options.clients}}}
    prometheus = {"namespaceSelector": {"matchLabels": {_NAMESPACE: options.monitoring}}}
    clients = [{"protocol": "TCP", "port": PORTS[name]} for name in ("http", "grpc")]
    ingress = [
        {"from": [peer], "ports": clients},
        {"from": [prometheus], "ports": [{"protocol": "TCP", "port": PORTS["metrics"]}]},
    ]
    egress = egress_to_stores() if options.model.scheme == "s3" else []
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": named(options),
        "spec": {
            "podSelector": {"matchLabels": selector(options)},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": ingress,
            "egress": egress,
        },
    }


def egress_to_stores() -> list[dict[str, Any]]:
    """Return rules for pods that ask for names, and open connections to port 443."""
    names = [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]
    return [{"ports": [*names, {"protocol": "TCP", "port": 443}]}]


def autoscaler(options: ManifestOptions, sizes: Sizes) -> dict[str, Any]:
    """Return the autoscaler: more pods when requests wait on average longer than a quarter of the queue's timeout.

    Fewer pods after ten quiet minutes, because a new pod needs a start of its own before it helps.
    """
    target = f"{max(1, sizes.queue_timeout_ms // 4)}m"  # thousandths of a second
    metric = {"metric": {"name": QUEUE_METRIC}, "target": {"type": "AverageValue", "averageValue": target}}
    deployed = f"{options.name}-predictor" if options.style == "kserve" else options.name
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": named(options),
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": deployed},
            "minReplicas": options.least,
            "maxReplicas": options.most,
            "metrics": [{"type": "Pods", "pods": metric}],
            "behavior": {
                "scaleUp": {"policies": [{"type": "Percent", "value": 100, "periodSeconds": 60}]},
                "scaleDown": {
                    "stabilizationWindowSeconds": 600,
                    "policies": [{"type": "Pods", "value": 1, "periodSeconds": 60}],
                },
            },
        },
    }


def secret_names(options: ManifestOptions) -> dict[str, str]:
    """Return name of a Secret → what the operator must put into it; no manifest holds a key."""
    return {
        keys_secret(options): "keys.txt, the key file, and probe.key, the key of the client that the probes are",
        **({tls_secret(options): "tls.crt and tls.key, as cert-manager writes them"} if options.tls else {}),
        metrics_secret(options): "key, the key of Prometheus in keys.txt",
        **(store_content(options.name) if options.model.scheme == "s3" and options.style == "deployment" else {}),
    }


def store_content(name: str) -> dict[str, str]:
    """Return the Secret of the object store, and what belongs in it."""
    content = "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and what the store needs besides; without keys, leave it out"
    return {store_secret(name): content}


def metrics_secret(options: ManifestOptions) -> str:
    return f"{options.name}-metrics-key"
