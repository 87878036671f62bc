"""Check manifests, also changed ones, against what the server needs: each problem has the name of its rule."""

from __future__ import annotations

from pathlib import Path

from gmmvit_deploy.manifests.checks.around import AROUND_RULES
from gmmvit_deploy.manifests.checks.jobs import JOB_RULES
from gmmvit_deploy.manifests.checks.load import load_objects
from gmmvit_deploy.manifests.checks.pods import POD_RULES
from gmmvit_deploy.manifests.checks.workload import Objects, Problem, jobs_of, workloads_of
from gmmvit_deploy.manifests.sizes import FILL_IN

__all__ = ["RULES", "Problem", "check_folder", "check_objects"]

RULES = tuple(sorted({*POD_RULES, *AROUND_RULES, *JOB_RULES, "fill-in", "workload"}))
"""The names of all rules."""
_ALSO_OF_JOBS = ("image-digest", "not-root", "plain-text-key", "read-only-root", "rights", "temporary-folder")
_AROUND_JOBS = ("network-policy", "secret-values")


def check_folder(folder: Path) -> list[Problem]:
    """Return the problems of the manifests in a folder, or of the output of ``kubectl kustomize`` in a file.

    Errors: InputError when the folder has no manifests, or when a file cannot be read.
    """
    return check_objects(load_objects(folder))


def check_objects(objects: Objects) -> list[Problem]:
    """Return the problems of these objects, in the order of the rules."""
    workloads, jobs = workloads_of(objects), jobs_of(objects)
    problems = []
    if not workloads and not jobs:
        expected = "expected a Deployment, a ServingRuntime with an InferenceService, or a Job"
        problems.append(Problem("workload", "-", expected))
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
    for job in jobs:
        for name, rule in {**JOB_RULES, **{each: POD_RULES[each] for each in _ALSO_OF_JOBS}}.items():
            problems += [Problem(name, job.where, text) for text in rule(job)]
        for name in _AROUND_JOBS:
            problems += [Problem(name, job.where, text) for text in AROUND_RULES[name](job, objects)]
    return problems


def _paths_of_fill_in(value: object, path: str = "") -> list[str]:
    if isinstance(value, dict):
        return [place for key, part in value.items() for place in _paths_of_fill_in(part, f"{path}.{key}".strip("."))]
    if isinstance(value, list):
        return [place for number, part in enumerate(value) for place in _paths_of_fill_in(part, f"{path}[{number}]")]
    return [path] if value == FILL_IN else []
