from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from gmmvit_cli.options import NAME, require_output
from gmmvit_cli.output import note, print_json
from gmmvit_cli.panels import FORCE, INPUT, JSON_OPTION, TARGET, Panel, listed, output_option, together, typed
from gmmvit_deploy.errors import InputError

if TYPE_CHECKING:
    from gmmvit_deploy.kubernetes.write import WrittenManifests

EXAMPLE = """gmmvit manifests bundle --image IMAGE@sha256:… --model-uri pvc://CLAIM
gmmvit manifests bundle --image I@sha256:… --model-uri s3://B/P --style kserve"""

_STYLES = ("kserve", "deployment", "job")
_CLUSTER, _BULK = Panel("Cluster"), Panel("Millions of images, with --style job")
_PLACE = "pvc://CLAIM/PATH or s3://BUCKET/PATH"


def _serving_manifests(
    path: Path,
    out: Path,
    uri: str,
    what: dict[str, Any],
    *,
    force: bool,
    tuned: Path | None = INPUT.option(
        "FILE",
        "The file gmmvit_tuning.json of 'gmmvit tune': CPU, memory, instances and threads. Without it, you fill "
        "them in.",
        must_exist=True,
        show_default=False,
    ),
    clients: str = _CLUSTER.option(
        "NAMESPACE",
        "Namespace whose pods may send requests, such as that of the ingress controller.",
        default="",
        show_default="pods of the same namespace with the label gmmvit-client=true",
    ),
    monitoring: str = _CLUSTER.option("NAMESPACE", "Namespace of Prometheus.", default="monitoring"),
    replicas: str = _CLUSTER.option("MIN:MAX", "Smallest and largest number of pods.", default="2:10"),
    gpus: int = _CLUSTER.option(
        "N", "GPUs of a pod.", default=0, min=0, show_default="1 for a repository that runs on a GPU, else 0"
    ),
    max_body: int = _CLUSTER.option(
        "BYTES", "Maximum size of a request. The pod's shared memory grows with it.", default=4 * 2**20
    ),
) -> WrittenManifests:
    """Write the manifests of a server.  what: further fields of `ManifestOptions`.  Errors: InputError."""
    from gmmvit_deploy.kubernetes.options import ManifestOptions, place
    from gmmvit_deploy.kubernetes.write import manifests_from_bundle

    least, _, most = replicas.partition(":")
    if not (least.isdigit() and most.isdigit()):
        raise InputError(f"--replicas: expected MIN:MAX, such as 2:10, got {replicas!r}")
    options = ManifestOptions(
        model=place(uri, "--model-uri", oci=True),
        clients=clients,
        monitoring=monitoring,
        max_body_bytes=max_body,
        gpus=gpus,
        least=int(least),
        most=int(most),
        **what,
    )
    return manifests_from_bundle(path, out, options, tuned=tuned, force=force)


def _job_manifests(
    path: Path,
    out: Path,
    uri: str,
    what: dict[str, Any],
    *,
    force: bool,
    source: str | None = _BULK.option("URI", f"Images to classify: {_PLACE}.", name="--from", show_default=False),
    results: str | None = _BULK.option("URI", f"Folder for the results: {_PLACE}.", name="--to", show_default=False),
    parts: int | None = _BULK.option(
        "N", "Number of pods among which the shards are divided.", min=1, show_default=False
    ),
    workers: int | None = _BULK.option("N", "Worker processes and CPUs of a pod.", min=1, show_default="1"),
    memory: str | None = _BULK.option(
        "SIZE", "Memory of a pod, such as 4Gi. Without it, you fill it in.", show_default=False
    ),
    runner: str | None = _BULK.option(
        "NAME[:PRECISION]", "Runner: onnxruntime or openvino.", show_default="onnxruntime"
    ),
    shard_images: int | None = _BULK.option(
        "N", "Maximum number of images in a shard.", min=1, show_default="as in gmmvit classify"
    ),
    image_column: str | None = _BULK.option(
        "NAME", "Column of Parquet files with the images, as in gmmvit classify.", show_default=False
    ),
) -> WrittenManifests:
    """Write the manifests of a job.  what: further fields of `JobOptions`.  Errors: InputError."""
    if source is None or results is None or parts is None:
        missing = next(n for n, v in {"--from": source, "--to": results, "--parts": parts}.items() if v is None)
        raise InputError(f"--style job needs --from, --to and --parts; {missing} is missing")
    from gmmvit_deploy.kubernetes.options import JobOptions, place
    from gmmvit_deploy.kubernetes.write import job_manifests_from_bundle

    passed_on = {"--shard-images": shard_images, "--image-column": image_column}
    options = JobOptions(
        model=place(uri, "--model-uri", oci=True),
        source=place(source, "--from"),
        results=place(results, "--to"),
        parts=parts,
        workers=workers or 1,
        memory=memory or "",
        runner=runner or "onnxruntime",
        more=tuple(str(word) for option in passed_on.items() if option[1] for word in option),
        **what,
    )
    return job_manifests_from_bundle(path, out, options, force=force)


def manifests(
    path: Path = INPUT.argument(
        "BUNDLE_OR_REPOSITORY",
        "The bundle or Triton model repository that --model-uri holds; for --style job, the bundle.",
    ),
    out: Path = output_option("FOLDER", "Folder to write to.", default=Path("kubernetes")),
    style: str = TARGET.option(
        "NAME",
        f"{listed(_STYLES)}. kserve: a ServingRuntime and an InferenceService; deployment: a Deployment and a "
        "Service; job: an Indexed Job that classifies the images of --from, once.",
        default="deployment",
        names=_STYLES,
    ),
    image: str = TARGET.option(
        "IMAGE",
        "Image of the server, or of the job; with its digest, NAME@sha256:DIGEST, it cannot change. This command "
        "writes its Dockerfile.",
        default="",
        show_default=False,
    ),
    model_uri: str = TARGET.option(
        "URI", "Where the model is: oci://IMAGE, pvc://CLAIM/PATH or s3://BUCKET/PATH.", default="", show_default=False
    ),
    fetch_image: str = TARGET.option(
        "IMAGE",
        "For a model at s3://, without KServe: image that is called with the URI and a folder, and copies the files.",
        default="",
        show_default=False,
    ),
    object_name: str = _CLUSTER.option("NAME", "Name of the objects in the cluster.", default="gmmvit"),
    name: str = NAME,
    for_serving: partial[WrittenManifests] = together(_serving_manifests),
    for_job: partial[WrittenManifests] = together(_job_manifests),
    force: bool = FORCE,
    as_json: bool = JSON_OPTION,
) -> None:
    """The folder is a base for kustomize, with an object in each file. The command 'kubectl apply -k' applies it. No
    file holds a key or a certificate: the command lists the Secrets that you must create.
    """
    require_output(out, force=force)
    from gmmvit_deploy.serving.served_models import read_models

    read_models(path, name=name)
    if not image or not model_uri:
        raise InputError(f"{path}: expected --image and --model-uri")
    write, other = (for_job, for_serving) if style == "job" else (for_serving, for_job)
    if unfit := typed(other):
        raise InputError(f"{unfit[0]} does not go with --style {style}", hint=f"leave {unfit[0]} out")
    what = {"image": image, "fetch_image": fetch_image, "name": object_name}
    if style != "job":
        what |= {"style": style, "model_name": name}
    _report(write(path, out, model_uri, what, force=force), as_json)


def _report(written: WrittenManifests, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "path": str(written.path),
                "apply": str(written.apply),
                "files": written.files,
                "secrets": dict(written.secrets),
                "warnings": written.warnings,
            }
        )
        return
    for warning in written.warnings:
        note(warning)
    for secret, content in written.secrets.items():
        note(f"create the Secret {secret}: {content}")
    dockerfile = next(name for name in written.files if name.endswith("/Dockerfile"))
    note(f"build the image of --image from {written.path / dockerfile}")
    if not written.complete:
        how = "measure them with gmmvit tune" if written.sizes else "type --memory"
        note(f"fill in the values in {written.apply / 'sizes.yaml'}, or {how}")
    typer.echo(written.apply)
