"""Write the manifests of a bundle as a kustomize base, and an overlay for what was not measured.

FOLDER/base/kustomization.yaml       the list of the objects, each in a file of its own
FOLDER/base/deployment.yaml …        or servingruntime.yaml and inferenceservice.yaml, or job.yaml
FOLDER/overlays/fill-in/…            without a measurement: values that an operator must fill in
FOLDER/docker/cpu, docker/tensorrt   Dockerfiles of the server, with their lists of packages; docker/bulk for a job
FOLDER/prometheus-adapter.yaml       what the Prometheus adapter needs to know
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gmmvit_deploy.bundle.artifacts import open_bundle
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.files.writing import new_folder
from gmmvit_deploy.kubernetes.dockerfiles import bulk_docker_files, docker_files
from gmmvit_deploy.kubernetes.job import JobOptions, fill_in_job, job_objects
from gmmvit_deploy.kubernetes.kserve import fill_in_kserve, inference_service, serving_runtime
from gmmvit_deploy.kubernetes.monitoring import adapter_rules, prometheus_rule, service_monitor
from gmmvit_deploy.kubernetes.objects import (
    autoscaler,
    deployment,
    disruption_budget,
    metrics_service,
    network_policy,
    secret_names,
    service,
    store_content,
)
from gmmvit_deploy.kubernetes.options import ManifestOptions
from gmmvit_deploy.kubernetes.pod import fill_in_patch
from gmmvit_deploy.kubernetes.sizes import Sizes, sizes_from_tuning, unknown_sizes
from gmmvit_deploy.kubernetes.yaml_text import yaml_text
from gmmvit_deploy.precision import precision_behind
from gmmvit_deploy.serving.served_models import ServedModels, read_models

__all__ = [
    "FILL_IN_OVERLAY",
    "WrittenManifests",
    "base_objects",
    "job_manifests_from_bundle",
    "manifests_from_bundle",
]

FILL_IN_OVERLAY = Path("overlays") / "fill-in"
_KUSTOMIZATION = "kustomization.yaml"
_FILL_IN = (
    "Replace every FILL_IN. gmmvit tune BUNDLE measures the values; gmmvit manifests --tuned FILE then writes them.",
    "cpu is instances · threads + 1. instances and threads are those of the repository at --model-uri: gmmvit pack",
    "writes them to the labels gmmvit.instances and gmmvit.threads of the image; 0 threads must be stated first.",
)
_FILL_IN_JOB = (
    "Replace every FILL_IN by the memory that a pod needs; gmmvit manifests --memory writes it.",
    "Measure it with gmmvit classify on some of the images, with the --workers of a pod.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenManifests:
    """path: the folder.  apply: the folder for ``kubectl apply -k``.  files: relative to the path.
    secrets: name of a Secret that the operator must create → its content.  complete: False if values must be filled in.
    warnings: about the options.  sizes: of a pod of the service; None for a job.
    """

    path: Path
    apply: Path
    files: tuple[str, ...]
    secrets: Mapping[str, str]
    complete: bool
    warnings: tuple[str, ...]
    sizes: Sizes | None = None


def manifests_from_bundle(
    path: Path, out: Path, options: ManifestOptions, *, tuned: Path | None = None, force: bool = False
) -> WrittenManifests:
    """Write the manifests for a bundle or a repository to the folder ``out``.

    tuned: the file of ``gmmvit tune`` for this bundle; without it, an operator must fill in the sizes.
    Errors: InputError when the measurement is of another bundle, or of other threads than those of a repository.
    RepositoryError when the bundle cannot be read.
    OutputError when ``out`` exists and ``force`` is False.
    """
    models = read_models(path, name=options.model_name)
    sizes = unknown_sizes(options.max_body_bytes, models.runtimes)
    if tuned is not None:
        sizes = sizes_from_tuning(tuned, models.bundle, options.max_body_bytes)
        _require_same_threads(path, models, sizes)
    probed = models.ensemble or models.names[0]
    objects = base_objects(options, sizes, bundle=models.bundle, probed=probed)
    adapter = yaml_text(
        adapter_rules(),
        "Part of the configuration of the Prometheus adapter, from which the autoscaler gets its metric.",
    )
    files = {"prometheus-adapter.yaml": adapter, **docker_files(sizes.runtime)}
    patch = (fill_in_patch if options.style == "deployment" else fill_in_kserve)(options.name)
    fill_in = None if sizes.known else yaml_text(patch, *_FILL_IN)
    written = _written(out, objects, files, fill_in, secret_names(options), options.warnings, force=force)
    return replace(written, sizes=sizes)


def _require_same_threads(path: Path, models: ServedModels, sizes: Sizes) -> None:
    """Check that a repository, if ``path`` is one, uses the cores that the measurement states.  Errors: InputError."""
    stated = models.network_threads
    if stated is not None and (str(stated[0]), str(stated[1])) != (sizes.instances, sizes.threads):
        raise InputError(
            f"{path}: the repository has {stated[0]} instances with {stated[1]} threads (0: for each core), "
            f"but --tuned states {sizes.instances} with {sizes.threads}",
            hint="type gmmvit pack BUNDLE --tuned FILE, which writes a repository with the settings of the file",
        )


def job_manifests_from_bundle(path: Path, out: Path, options: JobOptions, *, force: bool = False) -> WrittenManifests:
    """Write the manifests of an Indexed Job that classifies with the bundle at ``path``.

    Errors: BundleError when the bundle cannot be read. OutputError when ``out`` exists and ``force`` is False.
    """
    objects = job_objects(options, open_bundle(path).sha256)
    files = bulk_docker_files(precision_behind(options.runner)[0], store=options.uses_store)
    fill_in = None if options.memory else yaml_text(fill_in_job(options), *_FILL_IN_JOB)
    secrets = store_content(options.name) if options.uses_store else {}
    return _written(out, objects, files, fill_in, secrets, options.warnings, force=force)


def _written(
    out: Path,
    objects: Mapping[str, Any],
    more: Mapping[str, str],
    fill_in: str | None,
    secrets: Mapping[str, str],
    warnings: tuple[str, ...],
    *,
    force: bool,
) -> WrittenManifests:
    """Write objects and further files.  fill_in: a patch for an overlay, or None if nothing is to be filled in."""
    files = {f"base/{name}": yaml_text(data) for name, data in objects.items()}
    files[f"base/{_KUSTOMIZATION}"] = _kustomization(resources=list(objects))
    files.update(more)
    apply = Path("base")
    if fill_in is not None:
        apply = FILL_IN_OVERLAY
        files[f"{apply}/sizes.yaml"] = fill_in
        files[f"{apply}/{_KUSTOMIZATION}"] = _kustomization(resources=["../../base"], patches=[{"path": "sizes.yaml"}])
    with new_folder(out, force=force) as folder:
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
    return WrittenManifests(
        path=out,
        apply=out / apply,
        files=tuple(sorted(files)),
        secrets=secrets,
        complete=fill_in is None,
        warnings=warnings,
    )


def base_objects(options: ManifestOptions, sizes: Sizes, *, bundle: str, probed: str) -> dict[str, dict[str, Any]]:
    """Return name of a file → the object in it."""
    if options.style == "deployment":
        served = {
            "deployment.yaml": deployment(options, sizes, bundle=bundle, probed=probed),
            "service.yaml": service(options),
        }
    else:  # KServe makes the Deployment and the Service
        served = {
            "servingruntime.yaml": serving_runtime(options, sizes, bundle=bundle, probed=probed),
            "inferenceservice.yaml": inference_service(options, sizes, bundle=bundle),
        }
    return {
        **served,
        "service-metrics.yaml": metrics_service(options),
        "poddisruptionbudget.yaml": disruption_budget(options),
        "networkpolicy.yaml": network_policy(options),
        "horizontalpodautoscaler.yaml": autoscaler(options, sizes),
        "servicemonitor.yaml": service_monitor(options),
        "prometheusrule.yaml": prometheus_rule(options),
    }


def _kustomization(**fields: Any) -> str:
    return yaml_text({"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", **fields})
