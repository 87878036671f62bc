"""The pod that manifests describe, whether a Deployment or KServe makes it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

__all__ = [
    "Objects",
    "Problem",
    "Workload",
    "jobs_of",
    "mib_of",
    "of_kind",
    "option_of",
    "part",
    "quantity",
    "workloads_of",
]

Objects = Sequence[Mapping[str, Any]]
_PORT_OF = "serving.kserve.io/inferenceservice"
_UNITS = {"": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}


class Problem(NamedTuple):
    """rule: the name of the rule.  where: kind and name of the object.  text: what is wrong."""

    rule: str
    where: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """where: kind and name.  deployed: the name of the Deployment.  tls: True if the pod itself must do TLS.
    labels, annotations, pod: of the pods.  container: of the server, or of the bulk work.  job: the spec of a Job.
    """

    where: str
    deployed: str
    tls: bool
    labels: Mapping[str, Any]
    annotations: Mapping[str, Any]
    pod: Mapping[str, Any]
    container: Mapping[str, Any]
    model_uri: str = ""
    job: Mapping[str, Any] = field(default_factory=dict)

    @property
    def arguments(self) -> list[str]:
        """The command and its arguments."""
        return [str(word) for word in (*self.container.get("command", ()), *self.container.get("args", ()))]


def part(value: Any, *keys: str) -> Any:
    """Return the value below these keys, or an empty mapping."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return {} if value is None else value


def of_kind(objects: Objects, kind: str) -> list[Mapping[str, Any]]:
    return [item for item in objects if item.get("kind") == kind]


def workloads_of(objects: Objects) -> list[Workload]:
    """Return the pods of Deployments, and of InferenceServices with their ServingRuntime."""
    workloads = [_of_template(item, tls=True) for item in of_kind(objects, "Deployment")]
    runtimes = {part(item, "metadata", "name"): item for item in of_kind(objects, "ServingRuntime")}
    for item in of_kind(objects, "InferenceService"):
        predictor = part(item, "spec", "predictor")
        model = part(predictor, "model")
        runtime = part(runtimes.get(model.get("runtime"), {}), "spec")
        name = str(part(item, "metadata", "name"))
        containers = runtime.get("containers") or [{}]
        workloads.append(
            Workload(
                where=f"InferenceService/{name}",
                deployed=f"{name}-predictor",
                tls=False,
                labels={**part(predictor, "labels"), _PORT_OF: name},
                annotations=part(predictor, "annotations"),
                pod={**predictor, "volumes": runtime.get("volumes", [])},
                container={**containers[0], "resources": model.get("resources", {})},
                model_uri=str(model.get("storageUri", "")),
            )
        )
    return workloads


def jobs_of(objects: Objects) -> list[Workload]:
    """Return the pods of Jobs."""
    return [replace(_of_template(item, tls=False), job=part(item, "spec")) for item in of_kind(objects, "Job")]


def _of_template(item: Mapping[str, Any], *, tls: bool) -> Workload:
    template = part(item, "spec", "template")
    name = str(part(item, "metadata", "name"))
    containers = part(template, "spec", "containers") or [{}]
    return Workload(
        where=f"{item.get('kind')}/{name}",
        deployed=name,
        tls=tls,
        labels=part(template, "metadata", "labels"),
        annotations=part(template, "metadata", "annotations"),
        pod=part(template, "spec"),
        container=containers[0],
    )


def quantity(text: object) -> float | None:
    """Return a quantity of Kubernetes, such as ``500m`` or ``2Gi``, as a number; None if it is not a quantity."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([A-Za-z]*)", str(text))
    if match is None or match[2] not in _UNITS:
        return None
    return float(match[1]) * _UNITS[match[2]]


def mib_of(text: object) -> float | None:
    size = quantity(text)
    return None if size is None else size / 2**20


def option_of(words: Sequence[str], name: str) -> str:
    """Return the value of an option of a command line, or ""."""
    for word, following in zip(words, [*words[1:], ""], strict=False):
        if word == name:
            return following
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return ""
