from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from gmmvit_cli.commands import typing_hint
from gmmvit_cli.options import (
    SERVED_NAME,
    URL_VARIABLE,
    access_from,
    require_output_file,
)
from gmmvit_cli.output import complain, note, print_json
from gmmvit_cli.panels import INPUT, JSON_OPTION, MODEL, OUTPUT, TARGET, Panel, listed, together, typed
from gmmvit_cli.progress import progress
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.runtimes.runners.names import IN_PROCESS, runner_from

if TYPE_CHECKING:
    from gmmvit_deploy.images.data.files import LeftOut
    from gmmvit_deploy.images.labels import LabelSet
    from gmmvit_deploy.runtimes.programs.access import Access
    from gmmvit_deploy.runtimes.runners.classify import Classification

EXAMPLE = """gmmvit classify photo.jpg --bundle bundle
gmmvit classify photos/ --url grpc://localhost:8001 --top 3
gmmvit classify --bundle bundle --from photos/ --to results"""

_URL = "grpc://localhost:8001"
_BULK = Panel("Millions of images")
_USUAL_SHARD = 5000


def _classify_in_bulk(
    *,
    bundle: Path | None,
    runner: str | None,
    batch: int | None,
    as_json: bool,
    others: dict[str, Any],
    source: str | None = _BULK.option(
        "SOURCE",
        "Classify every image of a folder of images, of tar archives (WebDataset), or of Parquet files. SOURCE is a "
        "folder, a file or a pattern in quotes, on a disk or as a URL that fsspec opens, such as s3://bucket/images. "
        "Needs --bundle and --to.",
        name="--from",
    ),
    folder: str | None = _BULK.option(
        "FOLDER",
        "Folder or URL for the results: a Parquet file for each shard, with a row for each image. The same command "
        "again continues an interrupted run.",
        name="--to",
    ),
    launcher: str = _BULK.option(
        "NAME",
        "Who runs the shards of --from. local: worker processes on this machine. ray: tasks of a Ray cluster.",
        default="local",
        names=("local", "ray"),
    ),
    shard_images: int | None = _BULK.option(
        "N", "Maximum number of images in a shard of --from.", min=1, show_default=f"{_USUAL_SHARD}"
    ),
    workers: int | None = _BULK.option(
        "N", "Worker processes of --launcher local.", min=1, show_default="1 per core; 1 for a GPU"
    ),
    shards: str | None = _BULK.option(
        "I/N",
        "Classify only the shards I, I + N, I + 2N and so on of --from, with I from 0 on; JOB_COMPLETION_INDEX/N "
        "takes I from this variable, which Kubernetes sets in an Indexed Job.",
        show_default="all",
    ),
    image_column: str | None = _BULK.option(
        "NAME",
        "Column of Parquet files that holds the bytes or the paths of the images.",
        show_default="the only column of bytes",
    ),
    calibration: str | None = _BULK.option(
        "DATA",
        "Images like the expected images, named as in gmmvit convert. The report of --from lists images that are "
        "unlike these and the reference images of the bundle.",
    ),
    accept_broken: bool = OUTPUT.flag(
        "--accept-broken", "With --from: exit with status 0 even if images are broken. Their rows state the error."
    ),
) -> None:
    """Classify a source, and print what was done.

    others: options of ``gmmvit classify`` that have no meaning here → their values.
    Errors: InputError for options that do not fit together, and those of `classify_source`.
    """
    if source is None or folder is None or bundle is None:
        missing = next(name for name, v in {"--from": source, "--to": folder, "--bundle": bundle}.items() if v is None)
        raise InputError(
            f"--from, --to and --bundle go together; {missing} is missing",
            hint="type gmmvit classify --bundle BUNDLE --from SOURCE --to FOLDER",
        )
    if unfit := [option for option, value in others.items() if value]:
        raise InputError(
            f"{unfit[0]} does not go with --from", hint=f"leave {unfit[0]} out, or name the images without --from"
        )
    from gmmvit_deploy.bulk.run import REPORT, Launcher, classify_source, part_from
    from gmmvit_deploy.images.data.files import left_out_text

    chosen: Launcher = "ray" if launcher == "ray" else "local"
    with progress("classify") as on_progress:
        result = classify_source(
            bundle,
            source,
            folder,
            runner=runner,
            launcher=chosen,
            batch=batch,
            shard_images=shard_images or _USUAL_SHARD,
            image_column=image_column,
            part=None if shards is None else part_from(shards),
            workers=workers,
            calibration=calibration,
            on_progress=on_progress,
        )
    if as_json:
        print_json(result.to_json())
    else:
        typer.echo(folder)
    rate = f", {result.classified / result.seconds:,.0f} images/s" if result.classified else ""
    note(f"{result.images:,} images in {result.shards:,} shards; {result.classified:,} classified by this run{rate}")
    if result.left_out:
        note(left_out_text(result.left_out))
    if result.complete:
        note(f"report: {folder.rstrip('/')}/{REPORT}")
    else:
        note("other shards of the job are not complete yet")
    if result.errors:
        broken = f"{result.errors:,} of {result.images:,} images are broken; the column error states why"
        if accept_broken:
            note(broken)
            return
        complain(f"Error: {broken}")
        complain("hint: type --accept-broken to exit with status 0; for repaired images, type --to with a new folder")
        raise typer.Exit(1)


def classify(
    images: list[str] | None = INPUT.argument(
        "IMAGE|FOLDER|GLOB", "Image files, folders, or glob patterns.", default=None
    ),
    bundle: Path | None = INPUT.option(
        "BUNDLE",
        "Classify with this bundle (the folder that gmmvit export writes), without a server.",
        must_exist=True,
    ),
    url: str | None = TARGET.option(
        "URL",
        "Triton server that classifies: grpc://HOST:PORT or http://HOST:PORT; with TLS, grpcs:// or https://.",
        show_default=f"the variable {URL_VARIABLE}, else {_URL}",
    ),
    access: partial[Access] = together(access_from),
    served_name: str = SERVED_NAME,
    batch: int | None = TARGET.option(
        "N",
        "Maximum images per request; with --from, the images of each batch.",
        min=1,
        show_default="16; with --from, the largest batch of the bundle",
    ),
    concurrency: int = TARGET.option("N", "Maximum number of concurrent requests.", default=4, min=1, max=64),
    retry_for: float = TARGET.option(
        "S",
        "Time in seconds in which a request that an overloaded server refuses is repeated, after random waits. "
        "0: never.",
        default=30.0,
        min=0,
    ),
    runner: str | None = MODEL.option(
        "NAME[:PRECISION]",
        f"Runner of --bundle, and its precision (default: fp32), such as openvino:bf16. NAME is {listed(IN_PROCESS)}.",
        names=IN_PROCESS,
        read=lambda text: runner_from(text, IN_PROCESS),
        show_default="the choice of gmmvit optimize or gmmvit export for this machine",
    ),
    top: int = OUTPUT.option("N", "Number of classes to print per image.", default=5, min=1),
    features: Path | None = OUTPUT.option(
        "FILE.npz",
        "Also write the features of the images: the arrays features (N, D) and files (N). The bundle needs "
        "features: gmmvit export --outputs features or --outputs both.",
    ),
    in_bulk: partial[None] = together(_classify_in_bulk),
    force: bool = OUTPUT.flag("--force", "Replace the file of --features if it exists."),
    as_json: bool = JSON_OPTION,
) -> None:
    """Prints the most likely labels of each image with their probabilities; for a multi-label bundle, the labels that
    reach their thresholds. With --from and --to, writes Parquet files for any number of images. The exit status is 1
    if a file cannot be classified.
    """
    if typed(in_bulk):
        others = {
            "IMAGE": images,
            "--url": url,
            "--key-file": access.keywords["key_file"],
            "--ca": access.keywords["ca"],
        }
        others |= {"--features": features, "--force": force}
        in_bulk(bundle=bundle, runner=runner, batch=batch, as_json=as_json, others=others)
        return
    _require_fitting(bundle, url, features, runner, force=force)
    if not images:
        raise InputError("expected images: files, folders or patterns", hint=typing_hint("classify"))
    from gmmvit_deploy.bundle.artifacts import open_bundle
    from gmmvit_deploy.images.data.files import LeftOut, left_out_text
    from gmmvit_deploy.runtimes.runners.classify import (
        BundleClassifier,
        Classification,
        TritonClassifier,
        classify_files,
        write_features,
    )

    left_out = LeftOut()
    files, missing = _files_of(images, left_out)
    with progress("classify") as on_progress:
        classifier = (
            BundleClassifier(open_bundle(bundle), runner=runner)
            if bundle is not None
            else TritonClassifier(
                url or os.environ.get(URL_VARIABLE) or _URL,
                model=served_name,
                access=access(),
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
    answers += [Classification(path=Path(name), runner=classifier.runner, error=why) for name, why in missing.items()]
    if features is not None:
        write_features(features, answers, force=force)
    if classifier.notice:
        note(classifier.notice)
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
    if kinds := left_out.kinds():
        note(left_out_text(kinds))
    for answer in failed:
        complain(f"Error: {answer.path}: {answer.error}")
    if failed:
        complain(
            f"hint: {len(failed)} of {len(answers)} files were not classified; repair these files, or leave them out"
        )
        raise typer.Exit(1)


def _files_of(arguments: list[str], left_out: LeftOut) -> tuple[list[Path], dict[str, str]]:
    """Return the files that the arguments name, and the arguments that name no file, each with the reason.

    Errors: InputError when no argument names a file.
    """
    from gmmvit_deploy.images.data.files import image_files

    files: list[Path] = []
    missing: dict[str, str] = {}
    for argument in arguments:
        try:
            files += image_files([argument], left_out)
        except InputError as exc:
            missing[argument] = str(exc).removeprefix(f"{argument}: ")
    if not files:
        raise InputError(
            "; ".join(f"{name}: {why}" for name, why in missing.items()),
            hint="type the paths of image files or of folders with images, or patterns in quotes",
        )
    return list(dict.fromkeys(files)), missing


def _require_fitting(
    bundle: Path | None, url: str | None, features: Path | None, runner: str | None, *, force: bool
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
    if bundle is None and runner is not None:
        raise InputError(
            "--runner needs --bundle; a running server keeps the runner that it was started with",
            hint=f"type gmmvit serve BUNDLE --runner {runner} to start a server with this runner",
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
