from __future__ import annotations

from pathlib import Path

import typer

from gmmvit_cli.choices import choice_from, complete, listed
from gmmvit_cli.options import FORCE, INPUT, NAME, OUTPUT, TARGET, existing, require_output
from gmmvit_cli.output import JSON_OPTION, note, print_json, print_table
from gmmvit_deploy.errors import InputError

EXAMPLE = """gmmvit manifests bundle --image IMAGE@sha256:… --model-uri pvc://CLAIM
gmmvit manifests bundle --image I@sha256:… --model-uri s3://B/P --style kserve
gmmvit manifests --check kubernetes"""

_EXISTING = existing("--tuned")
_STYLES = ("kserve", "deployment")
_CLUSTER = "Cluster"


def manifests(
    path: Path | None = typer.Argument(
        None,
        metavar="BUNDLE_OR_REPOSITORY",
        rich_help_panel=INPUT,
        show_default=False,
        help="The bundle or Triton model repository that --model-uri holds. Leave it out with --check.",
    ),
    out: Path = typer.Option(
        Path("kubernetes"), "-o", "--output", metavar="FOLDER", rich_help_panel=OUTPUT, help="Folder to write to."
    ),
    style: str = typer.Option(
        "deployment",
        metavar="NAME",
        rich_help_panel=TARGET,
        help=f"{listed(_STYLES)}. kserve: a ServingRuntime and an InferenceService; deployment: a Deployment and a "
        "Service.",
        callback=choice_from("--style", lambda: _STYLES),
        autocompletion=complete(lambda: _STYLES),
    ),
    image: str = typer.Option(
        "",
        metavar="IMAGE",
        rich_help_panel=TARGET,
        show_default=False,
        help="Image of the server with its digest, NAME@sha256:DIGEST. 'gmmvit pack' writes Dockerfiles for it.",
    ),
    model_uri: str = typer.Option(
        "",
        metavar="URI",
        rich_help_panel=TARGET,
        show_default=False,
        help="Where the model is: oci://IMAGE@sha256:DIGEST, pvc://CLAIM/PATH or s3://BUCKET/PATH.",
    ),
    fetch_image: str = typer.Option(
        "",
        metavar="IMAGE",
        rich_help_panel=TARGET,
        show_default=False,
        help="For s3:// and --style deployment: image that is called with the URI and a folder, and copies the files.",
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
        "monitoring", metavar="NAMESPACE", rich_help_panel=_CLUSTER, help="Namespace of Prometheus."
    ),
    replicas: str = typer.Option(
        "2:10", metavar="MIN:MAX", rich_help_panel=_CLUSTER, help="Smallest and largest number of pods."
    ),
    gpus: int = typer.Option(0, min=0, metavar="N", rich_help_panel=_CLUSTER, help="GPUs of a pod."),
    max_body: int = typer.Option(
        4 * 2**20,
        metavar="BYTES",
        rich_help_panel=_CLUSTER,
        help="Maximum size of a request. The pod's shared memory grows with it.",
    ),
    check: Path | None = typer.Option(
        None,
        "--check",
        metavar="FOLDER",
        rich_help_panel=INPUT,
        show_default=False,
        help="Write nothing: check the manifests in a folder, also changed ones, and list every problem. Exit status 1 "
        "if there is a problem.",
    ),
    force: bool = FORCE,
    as_json: bool = JSON_OPTION,
) -> None:
    """The folder is a base for kustomize, with an object in each file. The command 'kubectl apply -k' applies it. No
    file holds a key or a certificate: the command lists the Secrets that you must create.
    """
    if check is not None:
        _check(check, as_json=as_json)
        return
    if path is None:
        raise InputError("expected a bundle, --image and --model-uri, or --check FOLDER")
    require_output(out, force=force)
    from gmmvit_deploy.serving.gateway.models import read_models

    read_models(path, name=name)
    if not image or not model_uri:
        raise InputError(f"{path}: expected --image and --model-uri")
    from gmmvit_deploy.manifests.options import ManifestOptions
    from gmmvit_deploy.manifests.options import model_uri as read_uri
    from gmmvit_deploy.manifests.write import manifests_from_bundle

    least, _, most = replicas.partition(":")
    if not (least.isdigit() and most.isdigit()):
        raise InputError(f"--replicas: expected MIN:MAX, such as 2:10, got {replicas!r}")
    options = ManifestOptions(
        style=style,  # type: ignore[arg-type]  # checked by the callback
        image=image,
        model=read_uri(model_uri),
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
    written = manifests_from_bundle(path, out, options, tuned=tuned, force=force)
    if as_json:
        print_json(
            {
                "path": str(written.path),
                "apply": str(written.apply),
                "files": written.files,
                "secrets": dict(written.secrets),
            }
        )
        return
    for secret, content in written.secrets.items():
        note(f"create the Secret {secret}: {content}")
    if not written.sizes.known:
        note(f"fill in the values in {written.apply / 'sizes.yaml'}, or measure them with gmmvit tune")
    typer.echo(written.apply)


def _check(folder: Path, *, as_json: bool) -> None:
    from gmmvit_deploy.manifests.checks import check_folder

    problems = check_folder(folder)
    if as_json:
        print_json([{"rule": problem.rule, "object": problem.where, "problem": problem.text} for problem in problems])
    elif problems:
        print_table(("rule", "object", "problem"), [(each.rule, each.where, each.text) for each in problems])
    else:
        typer.echo(f"{folder}: no problem")
    if problems:
        raise typer.Exit(1)
