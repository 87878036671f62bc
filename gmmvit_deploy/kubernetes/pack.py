"""Write the build context of a model's image: a repository that a slim server can load, or the bundle for bulk work.

    FOLDER/Dockerfile    an image from scratch with the files below /models, where KServe looks, and with labels
    FOLDER/models/       the files

A repository holds all that the server needs at run time, also the compiled library of the CPU kernels, so the server's
image needs no compiler, no PyTorch and no ONNX.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from gmmvit_deploy import __version__
from gmmvit_deploy.bundle.artifacts import MANIFEST_FILE, open_bundle
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.files.leftovers import temporary_folder
from gmmvit_deploy.files.writing import new_folder
from gmmvit_deploy.kubernetes._sizes import measurement_from_file
from gmmvit_deploy.kubernetes.templates import docker_file
from gmmvit_deploy.runtimes.runners.names import ON_CPUS, ON_GPUS, runner_from
from gmmvit_deploy.serving.names import TUNING_FILE
from gmmvit_deploy.serving.options import RepositoryOptions
from gmmvit_deploy.serving.repository import repository_from_bundle
from gmmvit_deploy.serving.repository_runner import with_runner
from gmmvit_deploy.serving.served_models import ServedModels, read_models

Contents = Literal["repository", "bundle"]
BUNDLE_LABEL = "gmmvit.bundle.sha256"
INSTANCES_LABEL, THREADS_LABEL = "gmmvit.instances", "gmmvit.threads"
"""Of a repository with a network on a CPU: what `gmmvit manifests` must state as well.  0 threads: for each core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelContext:
    """path: the folder of the build context.  labels: of the image.  size: of the files, in bytes.

    notes: those of `Repository`.
    """

    path: Path
    labels: Mapping[str, str]
    size: int
    notes: tuple[str, ...] = ()


def pack(
    path: Path,
    out: Path,
    *,
    contents: Contents = "repository",
    tuned: Path | None = None,
    runner: str | None = None,
    name: str = "gmmvit",
    force: bool = False,
) -> ModelContext:
    """Write the build context of the image of the model at ``path``, a bundle or a repository, to the folder ``out``.

    contents: what the image of a bundle holds. A repository is packed as it is.
    tuned: the file of ``gmmvit tune``, whose best settings the repository gets; for a bundle.
    runner: of the network, as after ``--runner``, for a bundle; None takes that of ``tuned``, else the bundle's choice
    for this machine.
    name: the name of the served model; for a bundle.
    Errors: InputError when ``tuned`` is of another bundle, or does not go with ``path``. OutputError when ``out``
    exists and ``force`` is False, or when writing fails.
    """
    is_bundle = (path / MANIFEST_FILE).is_file()
    if not is_bundle:
        if tuned is not None or contents == "bundle":
            option = "--tuned" if tuned is not None else "--contents bundle"
            raise InputError(f"{path}: {option} needs a bundle, got a repository", hint=f"remove {option}")
        return _context(path, out, _repository_labels(read_models(path)), force=force)
    bundle = open_bundle(path)
    if contents == "bundle":
        return _context(path, out, _labels(bundle.sha256, "bundle"), force=force)
    options = RepositoryOptions(name=name)
    if tuned is not None:
        best = measurement_from_file(tuned, bundle.sha256, use="pack")
        options = replace(options, runner=best.runner, instances=best.instances, threads=best.threads, **best.settings)
    if runner is not None:
        options = with_runner(options, runner_from(runner, (*ON_CPUS, *ON_GPUS)))
    with temporary_folder("pack") as folder:
        notes = {TUNING_FILE: tuned.read_text(encoding="utf-8")} if tuned is not None else None
        made = repository_from_bundle(bundle, folder / "models", options, notes=notes)
        context = _context(made.path, out, _repository_labels(read_models(made.path)), force=force)
        return replace(context, notes=made.notes)


def _context(files: Path, out: Path, labels: Mapping[str, str], *, force: bool) -> ModelContext:
    with new_folder(out, force=force) as folder:
        shutil.copytree(files, folder / "models")
        for path in (folder / "models", *(folder / "models").rglob("*")):  # the pod runs as another user
            path.chmod(0o755 if path.is_dir() else 0o644)
        (folder / "Dockerfile").write_text(docker_file("model.Dockerfile.j2", labels=labels), encoding="utf-8")
    size = sum(path.stat().st_size for path in (out / "models").rglob("*") if path.is_file())
    return ModelContext(path=out, labels=labels, size=size)


def _repository_labels(models: ServedModels) -> dict[str, str]:
    stated = models.network_threads
    threads = {} if stated is None else {INSTANCES_LABEL: str(stated[0]), THREADS_LABEL: str(stated[1])}
    names = ", ".join(network.name for network in models.networks) if len(models.networks) > 1 else ""
    return {**_labels(models.bundles_in_words, "repository", names), **threads}


def _labels(bundle: str, contents: Contents, names: str = "") -> dict[str, str]:
    """names: of several models."""
    return {
        BUNDLE_LABEL: bundle,
        "gmmvit.contents": contents,
        "gmmvit.version": __version__,
        "org.opencontainers.image.title": f"models {names}" if names else f"model {bundle[:16]}",
    }
