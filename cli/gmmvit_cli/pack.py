from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

import typer

from gmmvit_cli.options import AS_JSON, FORCE, MODEL_NAME, RUNNER_OF_GRAPHS
from gmmvit_cli.output import note, print_json
from gmmvit_cli.panels import INPUT, OUTPUT, listed, output_option

EXAMPLE = """gmmvit pack bundle -o model-image
gmmvit pack bundle -o model-image --tuned model_repository/gmmvit_tuning.json"""

_Contents = Literal["repository", "bundle"]


def pack(
    path: Path = INPUT.argument("BUNDLE_OR_REPOSITORY", "The bundle or Triton model repository to pack."),
    out: Path = output_option("FOLDER", "Folder to write the build context to.", default=Path("model-image")),
    contents: _Contents = OUTPUT.option(
        "NAME",
        f"What the image of a bundle holds: {listed(get_args(_Contents))}. A server loads a repository without "
        "PyTorch, ONNX and a compiler; 'gmmvit classify --bundle' reads a bundle.",
        default="repository",
        names=get_args(_Contents),
    ),
    tuned: Path | None = INPUT.option(
        "FILE",
        "The file gmmvit_tuning.json of 'gmmvit tune', for a bundle: the repository gets its best settings.",
        must_exist=True,
        show_default=False,
    ),
    runner: str | None = RUNNER_OF_GRAPHS,
    name: str = MODEL_NAME,
    force: bool = FORCE,
    as_json: bool = AS_JSON,
) -> None:
    """The folder holds a Dockerfile and the files, from which docker, podman or buildah build an image without a base.
    The label gmmvit.bundle.sha256 states the bundle; gmmvit.instances and gmmvit.threads, the cores that it uses.
    """
    from gmmvit_deploy.kubernetes.pack import INSTANCES_LABEL, THREADS_LABEL
    from gmmvit_deploy.kubernetes.pack import pack as packed

    context = packed(path, out, contents=contents, tuned=tuned, runner=runner, name=name, force=force)
    if as_json:
        print_json(
            {"path": str(context.path), "labels": dict(context.labels), "bytes": context.size, "notes": context.notes}
        )
        return
    for line in context.notes:
        note(line)
    if context.labels.get(THREADS_LABEL) == "0":
        note(
            f"threads are not stated: each of {context.labels[INSTANCES_LABEL]} instances takes a thread for each core "
            "of its pod. Pack the bundle with --tuned, or a repository of gmmvit repository --threads N, so that the "
            "CPU limit of gmmvit manifests is right"
        )
    note(f"{context.size / 2**20:,.1f} MiB; build the image: docker build --tag IMAGE {out}")
    typer.echo(out)
