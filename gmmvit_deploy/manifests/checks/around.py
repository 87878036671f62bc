"""Rules for the objects around the pod: they must exist, select the pod, and fit it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gmmvit_deploy.manifests.checks.workload import Objects, Workload, of_kind, part
from gmmvit_deploy.manifests.objects import QUEUE_METRIC

__all__ = ["AROUND_RULES"]


def _selects(labels: Any, workload: Workload) -> bool:
    return bool(labels) and all(workload.labels.get(name) == value for name, value in labels.items())


def disruption_budget(workload: Workload, objects: Objects) -> Iterator[str]:
    budgets = of_kind(objects, "PodDisruptionBudget")
    if not budgets:
        yield "expected a PodDisruptionBudget: draining nodes could end all pods at the same time"
    for item in budgets:
        spec = part(item, "spec")
        if not _selects(part(spec, "selector", "matchLabels"), workload):
            yield f"{_name(item)}: its selector {part(spec, 'selector', 'matchLabels')} does not select the pods"
        if spec.get("maxUnavailable") in (0, "0%") or spec.get("minAvailable") == "100%":
            yield f"{_name(item)}: permits no disruption, so no node can be drained"


def _name(item: Mapping[str, Any]) -> str:
    return f"{item.get('kind')}/{part(item, 'metadata', 'name')}"


def network_policy(workload: Workload, objects: Objects) -> Iterator[str]:
    policies = [
        item
        for item in of_kind(objects, "NetworkPolicy")
        if _selects(part(item, "spec", "podSelector", "matchLabels"), workload)
    ]
    if not policies:
        yield "expected a NetworkPolicy whose podSelector selects the pods"
    for item in policies:
        spec = part(item, "spec")
        if not {"Ingress", "Egress"} <= set(spec.get("policyTypes", [])):
            yield f"{_name(item)}: expected policyTypes Ingress and Egress"
        for rule in spec.get("ingress") or []:
            peers = rule.get("from") or []
            if not peers or any(not any(part(peer, kind) for kind in peer) or _everybody(peer) for peer in peers):
                yield f"{_name(item)}: an ingress rule admits everybody: {rule}"
            if not rule.get("ports"):
                yield f"{_name(item)}: an ingress rule opens every port"
        for rule in spec.get("egress") or []:
            if not rule.get("ports") and not rule.get("to"):
                yield f"{_name(item)}: an egress rule permits every connection"


def _everybody(peer: Mapping[str, Any]) -> bool:
    return part(peer, "ipBlock", "cidr") in ("0.0.0.0/0", "::/0")


def service_selects(workload: Workload, objects: Objects) -> Iterator[str]:
    ports = {port.get("name"): port.get("containerPort") for port in workload.container.get("ports", [])}
    services = of_kind(objects, "Service")
    if not services:
        yield "expected a Service"
    for item in services:
        spec = part(item, "spec")
        if not _selects(spec.get("selector"), workload):
            yield f"{_name(item)}: its selector {spec.get('selector')} does not select the pods"
        for port in spec.get("ports", []):
            target = port.get("targetPort", port.get("port"))
            if target not in ports and target not in ports.values():
                yield f"{_name(item)}: the port {port.get('name')} leads to {target}, which the container does not have"


def autoscaler(workload: Workload, objects: Objects) -> Iterator[str]:
    scalers = of_kind(objects, "HorizontalPodAutoscaler")
    if not scalers:
        yield "expected a HorizontalPodAutoscaler"
    for item in scalers:
        spec = part(item, "spec")
        target = part(spec, "scaleTargetRef", "name")
        if target != workload.deployed:
            yield f"{_name(item)}: scales {target}, but the pods are those of {workload.deployed}"
        metrics = [part(metric, "pods", "metric", "name") for metric in spec.get("metrics", [])]
        if QUEUE_METRIC not in metrics:
            yield f"{_name(item)}: expected the metric {QUEUE_METRIC}, got {spec.get('metrics')}"
        if spec.get("minReplicas", 1) < 2:
            yield f"{_name(item)}: expected minReplicas of 2 at least; a single pod is away when its node is"


def service_monitor(workload: Workload, objects: Objects) -> Iterator[str]:
    monitors = of_kind(objects, "ServiceMonitor")
    if not monitors:
        yield "expected a ServiceMonitor: without metrics, no alert fires, and the number of pods does not change"
    services = of_kind(objects, "Service")
    for item in monitors:
        labels = part(item, "spec", "selector", "matchLabels")
        chosen = [each for each in services if labels and labels.items() <= part(each, "metadata", "labels").items()]
        names = {port.get("name") for service in chosen for port in part(service, "spec", "ports")}
        if not chosen:
            yield f"{_name(item)}: its selector {labels} selects no Service"
        for endpoint in part(item, "spec", "endpoints"):
            if chosen and endpoint.get("port") not in names:
                yield f"{_name(item)}: the port {endpoint.get('port')} is none of {', '.join(sorted(names))}"
            jobs = [
                rule.get("replacement") for rule in endpoint.get("relabelings", []) if rule.get("targetLabel") == "job"
            ]
            if jobs != ["gmmvit"]:
                yield f"{_name(item)}: expected a relabeling to the job gmmvit, which the alert rules select"


def alert_rules(workload: Workload, objects: Objects) -> Iterator[str]:
    rules = [
        rule
        for item in of_kind(objects, "PrometheusRule")
        for group in part(item, "spec", "groups")
        for rule in group.get("rules", [])
    ]
    if not any("alert" in rule for rule in rules):
        yield "expected a PrometheusRule with alerts"
    if not any(rule.get("record") == QUEUE_METRIC for rule in rules):
        yield f"expected a rule that records {QUEUE_METRIC}, by which the number of pods is chosen"


def no_secret_values(workload: Workload, objects: Objects) -> Iterator[str]:
    for item in of_kind(objects, "Secret"):
        if item.get("data") or item.get("stringData"):
            yield f"{_name(item)}: a Secret with its values; files of manifests are copied and kept in git"


AROUND_RULES: Mapping[str, Callable[[Workload, Objects], Iterator[str]]] = {
    "disruption-budget": disruption_budget,
    "network-policy": network_policy,
    "service": service_selects,
    "autoscaler": autoscaler,
    "service-monitor": service_monitor,
    "alert-rules": alert_rules,
    "secret-values": no_secret_values,
}
"""Name → rule.  A rule yields a sentence for each problem."""
