from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer

from gmmvit_cli.options import CPU_KERNELS, cpu_kernels_from
from gmmvit_cli.output import JSON_OPTION, note, print_json, progress
from gmmvit_deploy.errors import InputError


def classify(
    images: list[str] = typer.Argument(metavar="IMAGE|FOLDER|GLOB...", help="JPEG, PNG, WebP or BMP files."),
    url: str | None = typer.Option(
        None, help="A Triton server: grpc://host:port or http://host:port  [default: grpc://localhost:8001]"
    ),
    bundle: Path | None = typer.Option(None, help="Answer in this process from a bundle instead of a server."),
    model: str = typer.Option("gmmvit", help="Name of the model on the server."),
    top: int = typer.Option(5, min=1, help="Classes to list for each image."),
    batch: int = typer.Option(16, min=1, help="Images in one request."),
    concurrency: int = typer.Option(4, min=1, max=64, help="Requests at a time."),
    cpu_kernels: str | None = CPU_KERNELS,
    as_json: bool = JSON_OPTION,
) -> None:
    """Classify images: labels with probabilities, from a server or from a bundle in this process."""
    if bundle is not None and url is not None:
        raise InputError("--bundle answers in this process and --url asks a server; give one of them")
    kernels = cpu_kernels_from(cpu_kernels)
    if bundle is None and kernels is not None:
        raise InputError("--cpu-kernels goes with --bundle; what a server runs with was said when it was started")
    from gmmvit_deploy.artifacts import open_bundle
    from gmmvit_deploy.data.files import image_files
    from gmmvit_deploy.runners.classify import BundleClassifier, TritonClassifier, classify_files

    files = image_files(images)
    classifier = (
        BundleClassifier(open_bundle(bundle), cpu_kernels=kernels != "off")
        if bundle is not None
        else TritonClassifier(url or "grpc://localhost:8001", model=model)
    )
    with classifier, progress("classifying", total=len(files)) as advance:
        answers = classify_files(classifier, files, top=top, batch=batch, concurrency=concurrency, on_done=advance)
    if classifier.notice:
        note(f"cpu kernels: off: {classifier.notice}")
    failed = [answer for answer in answers if answer.error]
    if as_json:
        print_json([asdict(answer) for answer in answers])
    else:
        for answer in answers:
            if not answer.error:
                found = "  ".join(f"{p.label} {p.probability:.1%}" for p in answer.predictions)
                typer.echo(f"{answer.path}: {found}")
    for answer in failed:
        note(f"Error: {answer.path}: {answer.error}")
    if failed:
        note(f"hint: {len(failed)} of {len(answers)} files got no answer; the others did")
        raise typer.Exit(1)
