"""Check manifests, also changed ones, against what the server needs: each problem has the name of its rule."""

from __future__ import annotations

from pathlib import Path

from gmmvit_deploy.manifests.checks.around import AROUND_RULES
from gmmvit_deploy.manifests.checks.load import load_objects
from gmmvit_deploy.manifests.checks.pods import POD_RULES
from gmmvit_deploy.manifests.checks.workload import Objects, Problem, workloads_of
from gmmvit_deploy.manifests.sizes import FILL_IN

__all__ = ["RULES", "Problem", "check_folder", "check_objects"]

RULES = tuple(sorted({*POD_RULES, *AROUND_RULES, "fill-in", "workload"}))
"""The names of all rules."""


def check_folder(folder: Path) -> list[Problem]:
    """Return the problems of the manifests in a folder, or of the output of ``kubectl kustomize`` in a file.

    Errors: InputError when the folder has no manifests, or when a file cannot be read.
    """
    return check_objects(load_objects(folder))


def check_objects(objects: Objects) -> list[Problem]:
    """Return the problems of these objects, in the order of the rules."""
    workloads = workloads_of(objects)
    problems = []
    if not workloads:
        problems.append(Problem("workload", "-", "expected a Deployment, or a ServingRuntime with an InferenceService"))
    problems += [
        Problem("fill-in", str(item.get("kind")), f"{path} is not filled in")
        for item in objects
        for path in _paths_of_fill_in(item)
    ]
    for workload in workloads:
        for name, rule in POD_RULES.items():
            problems += [Problem(name, workload.where, text) for text in rule(workload)]
        for name, around in AROUND_RULES.items():
            problems += [Problem(name, workload.where, text) for text in around(workload, objects)]
    return problems


def _paths_of_fill_in(value: object, path: str = "") -> list[str]:
    if isinstance(value, dict):
        return [place for key, part in value.items() for place in _paths_of_fill_in(part, f"{path}.{key}".strip("."))]
    if isinstance(value, list):
        return [place for number, part in enumerate(value) for place in _paths_of_fill_in(part, f"{path}[{number}]")]
    return [path] if value == FILL_IN else []
