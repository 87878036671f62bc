"""Planted mistakes: each is reported by the name of its rule, and no other rule complains about it."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from gmmvit_deploy.artifacts import Bundle
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.manifests.checks import RULES, check_folder, check_objects
from gmmvit_deploy.manifests.checks.jobs import JOB_RULES
from gmmvit_deploy.manifests.checks.load import load_objects
from tests.manifests.made import write


class Edited:
    """Objects to change."""

    def __init__(self, objects: list[dict[str, Any]]) -> None:
        self.objects = objects

    def of(self, kind: str) -> dict[str, Any]:
        return next(item for item in self.objects if item["kind"] == kind)

    @property
    def template(self) -> dict[str, Any]:
        return self.of("Deployment")["spec"]["template"]

    @property
    def pod(self) -> dict[str, Any]:
        return self.template["spec"]

    @property
    def server(self) -> dict[str, Any]:
        return self.pod["containers"][0]

    def volume(self, name: str) -> dict[str, Any]:
        return next(volume for volume in self.pod["volumes"] if volume["name"] == name)

    def unmount(self, path: str) -> None:
        self.server["volumeMounts"] = [each for each in self.server["volumeMounts"] if each["mountPath"] != path]

    def drop(self, kind: str) -> None:
        self.objects = [item for item in self.objects if item["kind"] != kind]

    def argument(self, name: str, value: str) -> None:
        self.server["args"][self.server["args"].index(name) + 1] = value


def _health_probe(edited: Edited, name: str) -> None:
    edited.server[name] = {**edited.server[name], "httpGet": {"path": "/v2/health/live", "port": "http"}}
    del edited.server[name]["exec"]


MISTAKES: dict[str, tuple[str, Callable[[Edited], Any]]] = {
    "liveness of Triton's own health": ("probe-infers", lambda e: _health_probe(e, "livenessProbe")),
    "readiness of Triton's own health": ("probe-infers", lambda e: _health_probe(e, "readinessProbe")),
    "a probe that is cut off": ("probe-timeout", lambda e: e.server["readinessProbe"].update(timeoutSeconds=1)),
    "a probe for another bundle": ("probe-bundle", lambda e: e.template["metadata"]["annotations"].update(
        {"gmmvit/bundle-sha256": "0" * 64})),
    "no startup probe": ("startup-probe", lambda e: e.server.pop("startupProbe")),
    "a startup shorter than the start": ("startup-probe", lambda e: e.server["startupProbe"].update(
        failureThreshold=5)),
    "a liveness that is impatient": ("liveness-patience", lambda e: e.server["livenessProbe"].update(
        failureThreshold=3)),
    "no shared memory": ("shared-memory", lambda e: e.unmount("/dev/shm")),
    "shared memory on a disk": ("shared-memory", lambda e: e.volume("shared-memory")["emptyDir"].pop("medium")),
    "too little shared memory": ("shared-memory", lambda e: e.volume("shared-memory")["emptyDir"].update(
        sizeLimit="64Mi")),
    "no preStop": ("pre-stop", lambda e: e.server.pop("lifecycle")),
    "a grace period shorter than the exit": ("grace-period", lambda e: e.pod.update(terminationGracePeriodSeconds=30)),
    "the usual grace period": ("grace-period", lambda e: e.pod.pop("terminationGracePeriodSeconds")),
    "cores that contradict the threads": ("cpu-threads", lambda e: [e.server["resources"][each].update(cpu="2")
        for each in ("limits", "requests")]),
    "no CPU limit": ("cpu-threads", lambda e: [e.server["resources"][each].pop("cpu")
        for each in ("limits", "requests")]),
    "memory smaller than its parts": ("memory", lambda e: [e.server["resources"][each].update(memory="256Mi")
        for each in ("limits", "requests")]),
    "no memory limit": ("memory", lambda e: e.server["resources"]["limits"].pop("memory")),
    "root": ("not-root", lambda e: e.pod["securityContext"].update(runAsUser=0)),
    "root is not forbidden": ("not-root", lambda e: e.pod["securityContext"].pop("runAsNonRoot")),
    "privileges": ("rights", lambda e: e.server["securityContext"].update(allowPrivilegeEscalation=True)),
    "all capabilities": ("rights", lambda e: e.server["securityContext"].pop("capabilities")),
    "a writable root": ("read-only-root", lambda e: e.server["securityContext"].update(readOnlyRootFilesystem=False)),
    "no temporary folder": ("temporary-folder", lambda e: e.unmount("/tmp")),
    "an image by tag": ("image-digest", lambda e: e.server.update(image="registry.example/gmmvit:latest")),
    "a model by tag": ("image-digest", lambda e: e.volume("model")["image"].update(reference="registry.example/m:1")),
    "no gateway": ("gateway", lambda e: e.server["args"].remove("--gateway")),
    "no TLS": ("gateway", lambda e: e.server["args"].append("--insecure")),
    "a key in the environment": ("plain-text-key", lambda e: e.server["env"].append(
        {"name": "GMMVIT_KEY", "value": "k3y"})),
    "keys in a ConfigMap": ("plain-text-key", lambda e: (e.volume("keys").pop("secret"), e.volume("keys").update(
        configMap={"name": "keys"}))),
    "a Secret in the folder": ("secret-values", lambda e: e.objects.append(
        {"kind": "Secret", "metadata": {"name": "s"}, "stringData": {"keys.txt": "web k3y"}})),
    "no disruption budget": ("disruption-budget", lambda e: e.drop("PodDisruptionBudget")),
    "a budget of other pods": ("disruption-budget", lambda e: e.of("PodDisruptionBudget")["spec"]["selector"].update(
        matchLabels={"app": "other"})),
    "a budget that blocks every node": ("disruption-budget", lambda e: e.of("PodDisruptionBudget")["spec"].update(
        maxUnavailable=0)),
    "no network policy": ("network-policy", lambda e: e.drop("NetworkPolicy")),
    "an open network policy": ("network-policy", lambda e: e.of("NetworkPolicy")["spec"]["ingress"][0].pop("from")),
    "a policy for all addresses": ("network-policy", lambda e: e.of("NetworkPolicy")["spec"]["ingress"][0].update(
        {"from": [{"ipBlock": {"cidr": "0.0.0.0/0"}}]})),
    "a policy without egress": ("network-policy", lambda e: e.of("NetworkPolicy")["spec"]["policyTypes"].remove(
        "Egress")),
    "a service of other pods": ("service", lambda e: e.of("Service")["spec"].update(selector={"app": "other"})),
    "a port that does not exist": ("service", lambda e: e.of("Service")["spec"]["ports"][0].update(targetPort=8080)),
    "an autoscaler of another object": ("autoscaler", lambda e: e.of("HorizontalPodAutoscaler")["spec"][
        "scaleTargetRef"].update(name="other")),
    "an autoscaler by CPU": ("autoscaler", lambda e: e.of("HorizontalPodAutoscaler")["spec"].update(metrics=[
        {"type": "Resource", "resource": {"name": "cpu"}}])),
    "metrics of no service": ("service-monitor", lambda e: e.of("ServiceMonitor")["spec"]["selector"].update(
        matchLabels={"app": "other"})),
    "metrics of another job": ("service-monitor", lambda e: e.of("ServiceMonitor")["spec"]["endpoints"][0].pop(
        "relabelings")),
    "no alerts": ("alert-rules", lambda e: e.drop("PrometheusRule")),
    "a size that nobody filled in": ("fill-in", lambda e: e.template["metadata"].update(note="FILL_IN")),
}  # fmt: skip
"""What an operator did → (the rule that must complain, how)."""


@pytest.fixture(scope="module")
def right(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return load_objects(write(bundle, tmp_path_factory.mktemp("right") / "out").apply)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_reported_by_its_rule_alone(right: list[dict[str, Any]], mistake: str) -> None:
    rule, plant = MISTAKES[mistake]
    assert check_objects(right) == []
    edited = Edited(deepcopy(right))
    plant(edited)
    assert {problem.rule for problem in check_objects(edited.objects)} == {rule}


def test_every_rule_has_a_mistake() -> None:
    assert {rule for rule, _ in MISTAKES.values()} | {"workload"} == set(RULES) - set(JOB_RULES)


def test_no_workload(right: list[dict[str, Any]]) -> None:
    assert {problem.rule for problem in check_objects(right[1:])} == {"workload"}


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: [", "expected YAML"), ("a: 1", "expected objects of Kubernetes"), ("[]", "expected objects of Kubernetes")],
)
def test_other_content_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(InputError, match=message):
        check_folder(tmp_path)


def test_an_empty_folder_and_an_unknown_kustomization_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a folder without them"):
        check_folder(tmp_path)
    (tmp_path / "kustomization.yaml").write_text("namePrefix: x-\nresources: []\n")
    with pytest.raises(InputError, match="got namePrefix"):
        check_folder(tmp_path)
