from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from gmmvit_cli.choices import choice_from, complete, listed
from gmmvit_cli.options import FORCE, INPUT, NAME, OUTPUT, TARGET, existing, require_output
from gmmvit_cli.output import JSON_OPTION, note, print_json
from gmmvit_deploy.errors import InputError

if TYPE_CHECKING:
    from gmmvit_deploy.kubernetes.write import WrittenManifests

EXAMPLE = """gmmvit manifests bundle --image IMAGE@sha256:… --model-uri pvc://CLAIM
gmmvit manifests bundle --image I@sha256:… --model-uri s3://B/P --style kserve"""

_EXISTING = existing("--tuned")
_STYLES = ("kserve", "deployment", "job")
_CLUSTER, _BULK = "Cluster", "Millions of images, with --style job"
_PLACE = "pvc://CLAIM/PATH or s3://BUCKET/PATH"
_REPLICAS, _BODY, _MONITORING = "2:10", 4 * 2**20, "monitoring"


def manifests(
    path: Path = typer.Argument(
        metavar="BUNDLE_OR_REPOSITORY",
        rich_help_panel=INPUT,
        help="The bundle or Triton model repository that --model-uri holds; for --style job, the bundle.",
    ),
    out: Path = typer.Option(
        Path("kubernetes"), "-o", "--output", metavar="FOLDER", rich_help_panel=OUTPUT, help="Folder to write to."
    ),
    style: str = typer.Option(
        "deployment",
        metavar="NAME",
        rich_help_panel=TARGET,
        help=f"{listed(_STYLES)}. kserve: a ServingRuntime and an InferenceService; deployment: a Deployment and a "
        "Service; job: an Indexed Job that classifies the images of --from, once.",
        callback=choice_from("--style", lambda: _STYLES),
        autocompletion=complete(lambda: _STYLES),
    ),
    image: str = typer.Option(
        "",
        metavar="IMAGE",
        rich_help_panel=TARGET,
        show_default=False,
        help="Image of the server, or of the job; with its digest, NAME@sha256:DIGEST, it cannot change. This command "
        "writes Dockerfiles for it.",
    ),
    model_uri: str = typer.Option(
        "",
        metavar="URI",
        rich_help_panel=TARGET,
        show_default=False,
        help="Where the model is: oci://IMAGE, pvc://CLAIM/PATH or s3://BUCKET/PATH.",
    ),
    fetch_image: str = typer.Option(
        "",
        metavar="IMAGE",
        rich_help_panel=TARGET,
        show_default=False,
        help="For a model at s3://, without KServe: image that is called with the URI and a folder, and copies the "
        "files.",
    ),
    tuned: Path | None = typer.Option(
        None,
        metavar="FILE",
        rich_help_panel=INPUT,
        show_default=False,
        callback=_EXISTING,
        help="The file gmmvit_tuning.json of 'gmmvit tune': CPU, memory, instances and threads. Without it, you fill "
        "them in.",
    ),
    object_name: str = typer.Option(
        "gmmvit", metavar="NAME", rich_help_panel=_CLUSTER, help="Name of the objects in the cluster."
    ),
    name: str = NAME,
    clients: str = typer.Option(
        "",
        metavar="NAMESPACE",
        rich_help_panel=_CLUSTER,
        show_default="pods of the same namespace with the label gmmvit-client=true",
        help="Namespace whose pods may send requests, such as that of the ingress controller.",
    ),
    monitoring: str = typer.Option(
        _MONITORING, metavar="NAMESPACE", rich_help_panel=_CLUSTER, help="Namespace of Prometheus."
    ),
    replicas: str = typer.Option(
        _REPLICAS, metavar="MIN:MAX", rich_help_panel=_CLUSTER, help="Smallest and largest number of pods."
    ),
    gpus: int = typer.Option(0, min=0, metavar="N", rich_help_panel=_CLUSTER, help="GPUs of a pod."),
    max_body: int = typer.Option(
        _BODY,
        metavar="BYTES",
        rich_help_panel=_CLUSTER,
        help="Maximum size of a request. The pod's shared memory grows with it.",
    ),
    source: str | None = typer.Option(
        None, "--from", metavar="URI", rich_help_panel=_BULK, show_default=False, help=f"Images to classify: {_PLACE}."
    ),
    results: str | None = typer.Option(
        None,
        "--to",
        metavar="URI",
        rich_help_panel=_BULK,
        show_default=False,
        help=f"Folder for the results: {_PLACE}.",
    ),
    parts: int | None = typer.Option(
        None,
        min=1,
        metavar="N",
        rich_help_panel=_BULK,
        show_default=False,
        help="Number of pods among which the shards are divided.",
    ),
    workers: int | None = typer.Option(
        None, min=1, metavar="N", rich_help_panel=_BULK, show_default="1", help="Worker processes and CPUs of a pod."
    ),
    memory: str | None = typer.Option(
        None,
        metavar="SIZE",
        rich_help_panel=_BULK,
        show_default=False,
        help="Memory of a pod, such as 4Gi. Without it, you fill it in.",
    ),
    runner: str | None = typer.Option(
        None,
        metavar="NAME[:PRECISION]",
        rich_help_panel=_BULK,
        show_default="onnxruntime",
        help="Runner: onnxruntime or openvino.",
    ),
    shard_images: int | None = typer.Option(
        None,
        min=1,
        metavar="N",
        rich_help_panel=_BULK,
        show_default="as in gmmvit classify",
        help="Maximum number of images in a shard.",
    ),
    image_column: str | None = typer.Option(
        None,
        metavar="NAME",
        rich_help_panel=_BULK,
        show_default=False,
        help="Column of Parquet files with the images, as in gmmvit classify.",
    ),
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
    of_job = {"--from": source, "--to": results, "--parts": parts, "--workers": workers, "--memory": memory}
    of_job |= {"--runner": runner, "--shard-images": shard_images, "--image-column": image_column}
    others = {"--tuned": tuned, "--clients": clients, "--gpus": gpus, "--monitoring": monitoring != _MONITORING}
    others |= {"--replicas": replicas != _REPLICAS, "--max-body": max_body != _BODY}
    if unfit := [option for option, value in (others if style == "job" else of_job).items() if value]:
        raise InputError(f"{unfit[0]} does not go with --style {style}", hint=f"leave {unfit[0]} out")
    if style == "job":
        _report(_written_job(path, out, of_job, image, model_uri, fetch_image, object_name, force=force), as_json)
        return
    from gmmvit_deploy.kubernetes.options import ManifestOptions, place
    from gmmvit_deploy.kubernetes.write import manifests_from_bundle

    least, _, most = replicas.partition(":")
    if not (least.isdigit() and most.isdigit()):
        raise InputError(f"--replicas: expected MIN:MAX, such as 2:10, got {replicas!r}")
    options = ManifestOptions(
        style=style,  # type: ignore[arg-type]  # checked by the callback
        image=image,
        model=place(model_uri, "--model-uri", oci=True),
        name=object_name,
        model_name=name,
        clients=clients,
        monitoring=monitoring,
        fetch_image=fetch_image,
        max_body_bytes=max_body,
        gpus=gpus,
        least=int(least),
        most=int(most),
    )
    _report(manifests_from_bundle(path, out, options, tuned=tuned, force=force), as_json)


def _written_job(
    path: Path,
    out: Path,
    chosen: dict[str, Any],
    image: str,
    model_uri: str,
    fetch_image: str,
    object_name: str,
    *,
    force: bool,
) -> WrittenManifests:
    """Write the manifests of a job.  chosen: options of jobs → their values, or None.  Errors: InputError."""
    for option in ("--from", "--to", "--parts"):
        if chosen[option] is None:
            raise InputError(f"--style job needs --from, --to and --parts; {option} is missing")
    from gmmvit_deploy.kubernetes.options import JobOptions, place
    from gmmvit_deploy.kubernetes.write import job_manifests_from_bundle

    passed_on = ("--shard-images", "--image-column")
    options = JobOptions(
        image=image,
        model=place(model_uri, "--model-uri", oci=True),
        source=place(chosen["--from"], "--from"),
        results=place(chosen["--to"], "--to"),
        parts=chosen["--parts"],
        workers=chosen["--workers"] or 1,
        memory=chosen["--memory"] or "",
        runner=chosen["--runner"] or "onnxruntime",
        more=tuple(str(word) for name in passed_on if chosen[name] for word in (name, chosen[name])),
        name=object_name,
        fetch_image=fetch_image,
    )
    return job_manifests_from_bundle(path, out, options, force=force)


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
    if not written.complete:
        how = "measure them with gmmvit tune" if written.sizes else "type --memory"
        note(f"fill in the values in {written.apply / 'sizes.yaml'}, or {how}")
    typer.echo(written.apply)
