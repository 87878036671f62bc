"""ServiceMonitor and PrometheusRule of the Prometheus operator, and the rule of the Prometheus adapter."""

from __future__ import annotations

from typing import Any

from gmmvit_deploy.kubernetes.objects import QUEUE_METRIC, metrics_secret, named
from gmmvit_deploy.kubernetes.options import ManifestOptions
from gmmvit_deploy.kubernetes.yaml_text import parsed_yaml
from gmmvit_deploy.serving.gateway.files import ALERTS

__all__ = ["adapter_rules", "prometheus_rule", "queue_rule", "service_monitor"]

_JOB = "gmmvit"
"""The alert rules select the metrics by this job."""


def service_monitor(options: ManifestOptions) -> dict[str, Any]:
    """Return the monitor, with a key of its own; the certificate is that of the clients' host name."""
    endpoint = {
        "port": "metrics",
        "path": "/metrics",
        "scheme": "https" if options.tls else "http",
        "interval": "15s",
        "authorization": {"type": "Bearer", "credentials": {"name": metrics_secret(options), "key": "key"}},
        # Prometheus connects to the address of a pod, which no certificate states. The NetworkPolicy admits it alone.
        **({"tlsConfig": {"insecureSkipVerify": True}} if options.tls else {}),
        "relabelings": [{"targetLabel": "job", "replacement": _JOB}],
    }
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "ServiceMonitor",
        "metadata": named(options),
        "spec": {"selector": {"matchLabels": {"gmmvit-metrics": options.name}}, "endpoints": [endpoint]},
    }


def queue_rule(model_name: str) -> dict[str, str]:
    """Return the recording rule of the metric by which the number of pods is chosen.

    The time in HAProxy's queue is the mean of its last 1024 requests, so a pod without requests counts 0.
    """
    where = f'job="{_JOB}"'
    per = "by (namespace, pod)"
    network = f'{where}, model="{model_name}_network"'
    nothing = f"0 * max {per} (up{{{where}}})"
    waits = f'haproxy_backend_queue_time_average_seconds{{{where}, proxy=~"triton_http|triton_grpc|front"}}'
    asked = f"rate(haproxy_backend_http_requests_total{{{where}}}[1m]) > 0"
    gateway = f"(max {per} ({waits} and on (instance, proxy) {asked}) or {nothing})"
    queued = f"sum {per} (rate(nv_inference_queue_duration_us{{{network}}}[1m]))"
    answered = f"(sum {per} (rate(nv_inference_request_success{{{network}}}[1m])) > 0)"
    server = f"({queued} / {answered} / 1e6 or {nothing})"
    return {"record": QUEUE_METRIC, "expr": f"{gateway} + {server}"}


def prometheus_rule(options: ManifestOptions) -> dict[str, Any]:
    """Return the alert rules of the package, and the rule for the autoscaler."""
    groups = parsed_yaml(ALERTS.read_text(encoding="utf-8"))["groups"]
    scaling = {"name": "gmmvit-scaling", "rules": [queue_rule(options.model_name)]}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": named(options),
        "spec": {"groups": [*groups, scaling]},
    }


def adapter_rules() -> dict[str, Any]:
    """Return the rule that the Prometheus adapter needs to give the autoscaler the metric."""
    overrides = {"namespace": {"resource": "namespace"}, "pod": {"resource": "pod"}}
    rule = {
        "seriesQuery": f'{QUEUE_METRIC}{{namespace!="",pod!=""}}',
        "resources": {"overrides": overrides},
        "name": {"matches": QUEUE_METRIC},
        "metricsQuery": "max by (<<.GroupBy>>) (<<.Series>>{<<.LabelMatchers>>})",
    }
    return {"rules": [rule]}
