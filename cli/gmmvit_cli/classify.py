from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gmmvit_cli import bulk
from gmmvit_cli.access import CA, KEY_FILE, URL_VARIABLE, access_from
from gmmvit_cli.commands import typing_hint
from gmmvit_cli.options import (
    CPU_KERNELS,
    INPUT,
    OUTPUT,
    SERVED_NAME,
    TARGET,
    cpu_kernels_from,
    existing,
    require_output_file,
)
from gmmvit_cli.output import JSON_OPTION, complain, note, print_json
from gmmvit_cli.progress import progress
from gmmvit_deploy.errors import InputError

if TYPE_CHECKING:
    from gmmvit_deploy.images.labels import LabelSet
    from gmmvit_deploy.runtimes.runners.classify import Classification

EXAMPLE = """gmmvit classify photo.jpg --bundle bundle
gmmvit classify photos/ --url grpc://localhost:8001 --top 3
gmmvit classify --bundle bundle --from photos/ --to results"""

_URL = "grpc://localhost:8001"
_BUNDLE = typer.Option(
    None,
    metavar="BUNDLE",
    rich_help_panel=INPUT,
    callback=existing("--bundle"),
    help="Classify with this bundle (the folder that gmmvit export writes), without a server.",
)


def classify(
    images: list[str] | None = typer.Argument(
        None,
        metavar="IMAGE|FOLDER|GLOB",
        rich_help_panel=INPUT,
        help="JPEG, PNG, WebP or BMP files, folders, or glob patterns.",
    ),
    bundle: Path | None = _BUNDLE,
    url: str | None = typer.Option(
        None,
        metavar="URL",
        rich_help_panel=TARGET,
        show_default=f"the variable {URL_VARIABLE}, else {_URL}",
        help="Triton server that classifies: grpc://HOST:PORT or http://HOST:PORT; with TLS, grpcs:// or https://.",
    ),
    key_file: Path | None = KEY_FILE,
    ca: Path | None = CA,
    served_name: str = SERVED_NAME,
    batch: int | None = typer.Option(
        None,
        min=1,
        metavar="N",
        rich_help_panel=TARGET,
        show_default="16; with --from, the largest batch of the bundle",
        help="Maximum images per request; with --from, the images of each batch.",
    ),
    concurrency: int = typer.Option(
        4, min=1, max=64, metavar="N", rich_help_panel=TARGET, help="Maximum number of concurrent requests."
    ),
    retry_for: float = typer.Option(
        30.0,
        min=0,
        metavar="S",
        rich_help_panel=TARGET,
        help="Time in seconds in which a request that an overloaded server refuses is repeated, after random waits. "
        "0: never.",
    ),
    cpu_kernels: str | None = CPU_KERNELS,
    top: int = typer.Option(
        5, min=1, metavar="N", rich_help_panel=OUTPUT, help="Number of classes to print per image."
    ),
    features: Path | None = typer.Option(
        None,
        metavar="FILE.npz",
        rich_help_panel=OUTPUT,
        help="Also write the features of the images: the arrays features (N, D) and files (N). The bundle needs "
        "features: gmmvit export --outputs features or --outputs both.",
    ),
    source: str | None = bulk.SOURCE,
    folder: str | None = bulk.FOLDER,
    runner: str | None = bulk.RUNNER,
    launcher: str = bulk.LAUNCHER,
    shard_images: int | None = bulk.SHARD_IMAGES,
    workers: int | None = bulk.WORKERS,
    shards: str | None = bulk.SHARDS,
    image_column: str | None = bulk.IMAGE_COLUMN,
    calibration: str | None = bulk.REFERENCE,
    accept_broken: bool = bulk.ACCEPT_BROKEN,
    force: bool = typer.Option(
        False, "--force", rich_help_panel=OUTPUT, help="Replace the file of --features if it exists."
    ),
    as_json: bool = JSON_OPTION,
) -> None:
    """Prints the most likely labels of each image with their probabilities; for a multi-label bundle, the labels that
    reach their thresholds. With --from and --to, writes Parquet files for any number of images. The exit status is 1
    if a file cannot be classified.
    """
    of_bulk = (source, folder, runner, shard_images, workers, shards, image_column, calibration)
    if any(value is not None for value in of_bulk) or launcher != "local" or accept_broken:
        bulk.classify_in_bulk(
            bundle=bundle,
            source=source,
            folder=folder,
            runner=runner,
            launcher=launcher,
            batch=batch,
            shard_images=shard_images,
            workers=workers,
            shards=shards,
            image_column=image_column,
            calibration=calibration,
            accept_broken=accept_broken,
            as_json=as_json,
            others={
                "IMAGE": images,
                "--url": url,
                "--key-file": key_file,
                "--ca": ca,
                "--features": features,
                "--force": force,
                "--cpu-kernels": cpu_kernels,
            },
        )
        return
    _require_fitting(bundle, url, features, cpu_kernels, force=force)
    if not images:
        raise InputError("expected images: files, folders or patterns", hint=typing_hint("classify"))
    kernels = cpu_kernels_from(cpu_kernels)
    from gmmvit_deploy.bundle.artifacts import open_bundle
    from gmmvit_deploy.images.data.files import image_files
    from gmmvit_deploy.runtimes.runners.classify import (
        BundleClassifier,
        TritonClassifier,
        classify_files,
        write_features,
    )

    files = image_files(images)
    with progress("classify") as on_progress:
        classifier = (
            BundleClassifier(open_bundle(bundle), cpu_kernels=kernels != "off")
            if bundle is not None
            else TritonClassifier(
                url or os.environ.get(URL_VARIABLE) or _URL,
                model=served_name,
                access=access_from(key_file, ca),
                retry_s=retry_for,
            )
        )
        with classifier:
            answers = classify_files(
                classifier,
                files,
                top=top,
                batch=batch or 16,
                concurrency=concurrency,
                features=features is not None,
                on_progress=on_progress,
            )
    if features is not None:
        write_features(features, answers, force=force)
    if classifier.notice:
        note(f"not the fastest runner: {classifier.notice}")
    failed = [answer for answer in answers if answer.error]
    if as_json:
        print_json([answer.to_json() for answer in answers])
    else:
        label_set = classifier.label_set
        for answer in answers:
            if answer.predictions:
                typer.echo(f"{answer.path}: {_shown(answer, label_set)}")
    if features is not None:
        note(f"features: {features}")
    for answer in failed:
        complain(f"Error: {answer.path}: {answer.error}")
    if failed:
        complain(
            f"hint: {len(failed)} of {len(answers)} files were not classified; repair or remove the files named above"
        )
        raise typer.Exit(1)


def _require_fitting(
    bundle: Path | None, url: str | None, features: Path | None, cpu_kernels: str | None, *, force: bool
) -> None:
    """Refuse options that do not fit together, before any work.  Errors: InputError, OutputError."""
    if bundle is not None and url is not None:
        raise InputError(
            "--bundle (classify locally) and --url (ask a server) exclude each other",
            hint="type --bundle or --url, not both",
        )
    require_output_file(features, force=force)
    if features is not None and features.suffix != ".npz":
        raise InputError(f"--features {features}: expected the name of an .npz file", hint="type --features FILE.npz")
    if bundle is None and cpu_kernels is not None:
        raise InputError(
            "--cpu-kernels needs --bundle; a running server keeps the choice that was made at its start",
            hint=f"type gmmvit serve BUNDLE --cpu-kernels {cpu_kernels} to start a server with this choice",
        )


def _shown(answer: Classification, label_set: LabelSet) -> str:
    """Return the classes with their probabilities; of a multi-label network, the classes that reach their threshold."""
    names = label_set.names
    shown = [
        f"{names[guess.index] if names else guess.label} {guess.probability:.1%}"
        for guess in answer.predictions
        if guess.present
    ]
    return "  ".join(shown) or "no label reaches its threshold"
