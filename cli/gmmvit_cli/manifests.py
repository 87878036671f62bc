from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import typer

from gmmvit_cli.options import AS_JSON, FORCE, MODEL_NAME, of_fields, typed
from gmmvit_cli.output import note, print_json
from gmmvit_cli.panels import INPUT, TARGET, Panel, output_option
from gmmvit_deploy.errors import InputError

EXAMPLE = """gmmvit manifests bundle --image IMAGE@sha256:… --model-uri pvc://CLAIM
gmmvit manifests bundle --image I@sha256:… --model-uri s3://B/P --style kserve"""

_CLUSTER, _BULK = Panel("Cluster"), Panel("Millions of images, with --style job")
_Style = Literal["kserve", "deployment", "job"]
_PLACE = "pvc://CLAIM/PATH or s3://BUCKET/PATH"


def _replicas_from(text: str) -> tuple[int, int]:
    minimum, _, maximum = text.partition(":")
    if not (minimum.isdigit() and maximum.isdigit()):
        raise InputError(f"--replicas: expected MIN:MAX, such as 2:10, got {text!r}")
    return int(minimum), int(maximum)


def manifests(
    context: typer.Context,
    path: Path = INPUT.argument(
        "BUNDLE_OR_REPOSITORY",
        "The bundle or Triton model repository that --model-uri holds; for --style job, the bundle.",
    ),
    out: Path = output_option("FOLDER", "Folder to write to.", default=Path("kubernetes")),
    style: _Style = TARGET.option(
        "NAME",
        "kserve, deployment or job. kserve: a ServingRuntime and an InferenceService; deployment: a Deployment and a "
        "Service; job: an Indexed Job that classifies the images of --from, once.",
        default="deployment",
        names=get_args(_Style),
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
    name: str = MODEL_NAME,
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
    replicas: Sequence[int] = _CLUSTER.option(
        "MIN:MAX", "Smallest and largest number of pods.", default="2:10", parser=_replicas_from
    ),
    gpus: int = _CLUSTER.option(
        "N", "GPUs of a pod.", default=0, min=0, show_default="1 for a repository that runs on a GPU, else 0"
    ),
    max_body: int = _CLUSTER.option(
        "BYTES", "Maximum size of a request. The pod's shared memory grows with it.", default=4 * 2**20
    ),
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
    force: bool = FORCE,
    as_json: bool = AS_JSON,
) -> None:
    """The folder is a base for kustomize, with an object in each file. The command 'kubectl apply -k' applies it. No
    file holds a key or a certificate: the command lists the Secrets that you must create.
    """
    from gmmvit_deploy.serving.served_models import read_models

    read_models(path, name=name)
    if not image or not model_uri:
        raise InputError(f"{path}: expected --image and --model-uri")
    of_serving = [name for name in typed(context, _CLUSTER, "tuned") if name != "--object-name"]
    if unfit := of_serving if style == "job" else typed(context, _BULK):
        raise InputError(f"{unfit[0]} does not go with --style {style}", hint=f"leave {unfit[0]} out")
    from gmmvit_deploy.kubernetes.options import JobOptions, ManifestOptions, location
    from gmmvit_deploy.kubernetes.write import job_manifests_from_bundle, manifests_from_bundle

    model = location(model_uri, "--model-uri", oci=True)
    if style == "job":
        if source is None or results is None or parts is None:
            missing = next(n for n, v in {"--from": source, "--to": results, "--parts": parts}.items() if v is None)
            raise InputError(f"--style job needs --from, --to and --parts; {missing} is missing")
        passed_on = {"--shard-images": shard_images, "--image-column": image_column}
        job = JobOptions(
            image=image,
            fetch_image=fetch_image,
            name=object_name,
            model=model,
            source=location(source, "--from"),
            results=location(results, "--to"),
            parts=parts,
            workers=workers or 1,
            memory=memory or "",
            runner=runner or "onnxruntime",
            more=tuple(str(word) for option in passed_on.items() if option[1] for word in option),
        )
        written = job_manifests_from_bundle(path, out, job, force=force)
    else:
        read = {"name": object_name, "model": model, "model_name": name, "max_body_bytes": max_body}
        read |= {"min_pods": replicas[0], "max_pods": replicas[1]}
        options = ManifestOptions(**{**of_fields(ManifestOptions, context.params), **read})
        written = manifests_from_bundle(path, out, options, tuned=tuned, force=force)
    if as_json:
        shown = ("path", "apply", "files", "secrets", "warnings", "images")
        print_json({name: getattr(written, name) for name in shown})
        return
    for warning in written.warnings:
        note(warning)
    for secret, content in written.secrets.items():
        note(f"create the Secret {secret}: {content}")
    build = "build the image of --image from"
    for dockerfile, server in written.images.items():
        note(f"{build} {written.path / dockerfile}" + (f": {server}" if server else ""))
        build = "or, smaller, from"
    if not written.complete:
        how = "measure them with gmmvit tune" if written.sizes else "type --memory"
        note(f"fill in the values in {written.apply / 'sizes.yaml'}, or {how}")
    typer.echo(written.apply)
