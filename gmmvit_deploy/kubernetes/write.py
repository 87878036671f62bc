"""Write the manifests of a bundle as a kustomize base, and an overlay for what was not measured.

FOLDER/base/kustomization.yaml       the list of the objects, each in a file of its own
FOLDER/base/deployment.yaml …        or servingruntime.yaml and inferenceservice.yaml, or job.yaml
FOLDER/overlays/fill-in/…            without a measurement: values that an operator must fill in
FOLDER/docker/nvidia                 Dockerfile of a server that loads the repository; docker/bulk for a job
FOLDER/docker/cpu                    a small one, for a network in the python backend
FOLDER/prometheus-adapter.yaml       what the Prometheus adapter needs to know
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gmmvit_deploy.bundle.artifacts import MANIFEST_FILE, open_bundle
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.files.writing import new_folder
from gmmvit_deploy.inference.runner_name import RunnerName
from gmmvit_deploy.kubernetes._dockerfiles import bulk_docker_files, docker_files
from gmmvit_deploy.kubernetes._sizes import Sizes, measurement_from_file, pod_sizes
from gmmvit_deploy.kubernetes.options import JobOptions, ManifestOptions
from gmmvit_deploy.kubernetes.templates import yaml_files
from gmmvit_deploy.runtimes.engines.releases import NEWEST, RELEASES, triton_in_words
from gmmvit_deploy.runtimes.programs.openvino import why_no_openvino
from gmmvit_deploy.serving.gateway.files import ALERTS
from gmmvit_deploy.serving.served_models import ServedModels, read_models
from gmmvit_deploy.serving.server_wheel import TRITON

_OVERLAY = "overlays/fill-in"
_STORE_CONTENT = "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and what the store needs besides; without keys, leave it out"


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenManifests:
    """path: the folder.  apply: the folder for ``kubectl apply -k``.  files: relative to the path.
    secrets: name of a Secret that the operator must create → its content.  complete: False if values must be filled in.
    warnings: about the options, and about files that the operator must copy.
    images: Dockerfile, relative to the path → the server in its image ("" for a job); the first is recommended.
    sizes: of a pod of the service; None for a job.
    """

    path: Path
    apply: Path
    files: tuple[str, ...]
    secrets: Mapping[str, str]
    complete: bool
    warnings: tuple[str, ...]
    images: Mapping[str, str]
    sizes: Sizes | None = None


def manifests_from_bundle(
    path: Path, out: Path, options: ManifestOptions, *, tuned: Path | None = None, force: bool = False
) -> WrittenManifests:
    """Write the manifests for a bundle or a repository to the folder ``out``.

    tuned: the file of ``gmmvit tune`` for this bundle; without it, an operator must fill in the sizes.
    Errors: InputError when the measurement is of another bundle, or of another runtime or other threads than those of a
    repository, or for a repository of several bundles.
    RepositoryError when the bundle cannot be read.
    OutputError when ``out`` exists and ``force`` is False.
    """
    models = read_models(path, name=options.model_name)
    options = replace(options, gpus=max(options.gpus, int(models.on_gpu)))
    measurement = None
    if tuned is not None:
        if len(models.networks) > 1:
            raise InputError(
                f"{path}: --tuned is of one bundle, but the repository has the networks "
                + ", ".join(network.name for network in models.networks),
                hint="remove --tuned, and fill in the sizes",
            )
        measurement = measurement_from_file(tuned, models.bundle, use="serve")
    sizes = pod_sizes(measurement, options.max_body_bytes, _runtimes(models))
    if tuned is not None and not (path / MANIFEST_FILE).is_file():  # a bundle states no settings
        _require_same_settings(path, models, sizes)
    objects = yaml_files(
        "service.yaml.j2",
        options=options,
        sizes=sizes,
        bundle=models.bundles_in_words,
        alert_groups=ALERTS.read_text(encoding="utf-8").partition("\ngroups:\n")[2],
    )
    name = options.name
    secrets = {
        f"{name}-keys": "keys.txt, the key file",
        f"{name}-tls": "tls.crt and tls.key, as cert-manager writes them",
        f"{name}-metrics-key": "key, the key of Prometheus in keys.txt",
        f"{name}-store": _STORE_CONTENT,
    }
    if options.style == "kserve":
        del secrets[f"{name}-tls"]
    if options.style == "kserve" or options.model.scheme != "s3":
        del secrets[f"{name}-store"]
    backends = set(models.backends.values())
    engine = "tensorrt" in backends
    files = {**objects, **docker_files(sizes.runtimes, engine=engine, cpu=backends == {"python"})}
    newest = "the release of Triton that the engine needs" if engine else triton_in_words(RELEASES[NEWEST][0])
    images = {"docker/nvidia/Dockerfile": newest}
    if "docker/cpu/Dockerfile" in files:
        images["docker/cpu/Dockerfile"] = triton_in_words(TRITON)
    repository = f"the folder that gmmvit repository {path} writes" if (path / MANIFEST_FILE).is_file() else str(path)
    return _written(out, files, options, secrets, images=images, content=repository, sizes=sizes, force=force)


def _runtimes(models: ServedModels) -> frozenset[str]:
    """Return the runtimes of the networks in the python backend."""
    if models.runtimes or set(models.backends.values()) - {"python"}:
        return models.runtimes
    return frozenset(["onnxruntime" if why_no_openvino("fp32") else "openvino"])


def _require_same_settings(path: Path, models: ServedModels, sizes: Sizes) -> None:
    """Check that a repository uses the runtime and the cores that the measurement states.  Errors: InputError."""
    hint = "type gmmvit pack BUNDLE --tuned FILE, which writes a repository with the settings of the file"
    runtimes = _runtimes(models)
    if runtimes != sizes.runtimes:
        other = "another backend than python"
        raise InputError(
            f"{path}: the network of the repository runs in {', '.join(runtimes) or other}, but --tuned states "
            f"{', '.join(sizes.runtimes) or other}",
            hint=hint,
        )
    stated = models.network_threads
    if stated is not None and (str(stated[0]), str(stated[1])) != (sizes.instances, sizes.threads):
        raise InputError(
            f"{path}: the repository has {stated[0]} instances with {stated[1]} threads (0: for each core), "
            f"but --tuned states {sizes.instances} with {sizes.threads}",
            hint=hint,
        )


def job_manifests_from_bundle(path: Path, out: Path, options: JobOptions, *, force: bool = False) -> WrittenManifests:
    """Write the manifests of an Indexed Job that classifies with the bundle at ``path``.

    Errors: BundleError when the bundle cannot be read. OutputError when ``out`` exists and ``force`` is False.
    """
    objects = yaml_files("job.yaml.j2", options=options, bundle=open_bundle(path).sha256)
    docker = bulk_docker_files(RunnerName.parse(options.runner).name, store=options.uses_store)
    secrets = {f"{options.name}-store": _STORE_CONTENT} if options.uses_store else {}
    images = {"docker/bulk/Dockerfile": ""}
    return _written(out, {**objects, **docker}, options, secrets, images=images, content=str(path), force=force)


def _written(
    out: Path,
    files: Mapping[str, str],
    options: ManifestOptions | JobOptions,
    secrets: Mapping[str, str],
    *,
    images: Mapping[str, str],
    content: str,
    sizes: Sizes | None = None,
    force: bool,
) -> WrittenManifests:
    """Write the files, path → text, into the new folder ``out``.  content: the folder whose files the pods read.

    images: as in `WrittenManifests`.
    """
    with new_folder(out, force=force) as folder:
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
    complete = f"{_OVERLAY}/sizes.yaml" not in files
    # `gmmvit pack` puts the content into an image; nothing copies it to a claim or a bucket.
    copied = [] if options.model.scheme == "oci" else [f"copy the files in {content} to {options.model}"]
    return WrittenManifests(
        path=out,
        apply=out / ("base" if complete else _OVERLAY),
        files=tuple(sorted(files)),
        secrets=secrets,
        complete=complete,
        warnings=(*options.warnings, *copied),
        images=images,
        sizes=sizes,
    )
