from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import typer

from gmmvit_cli.commands import typing_hint
from gmmvit_cli.options import AS_JSON, CA, KEY_FILE, MODEL_NAME, URL_VARIABLE, access_from, checked_runner, typed
from gmmvit_cli.output import note, print_error, print_json
from gmmvit_cli.panels import INPUT, MODEL, OUTPUT, TARGET, Panel, completion, listed, refusals_of
from gmmvit_cli.progress import progress
from gmmvit_deploy.counts import counted
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.runtimes.runners.names import IN_PROCESS

if TYPE_CHECKING:
    from gmmvit_deploy.bulk.run import BulkResult
    from gmmvit_deploy.images.data.files import LeftOut
    from gmmvit_deploy.inference.labels import LabelSet
    from gmmvit_deploy.runtimes.runners.classify import Classification

COLLECTS = True
EXAMPLE = """gmmvit classify photo.jpg --bundle bundle
gmmvit classify photos/ --url grpc://localhost:8001 --top 3
gmmvit classify --bundle bundle --from photos/ --to results"""

_DEFAULT_URL = "grpc://localhost:8001"
_Launcher = Literal["local", "ray"]
_BULK = Panel("Millions of images")


def classify(
    context: typer.Context,
    images: list[str] | None = INPUT.argument(
        "IMAGE|FOLDER|GLOB", "Image files, folders, or glob patterns.", default=None
    ),
    bundle: Path | None = INPUT.option(
        "BUNDLE",
        "Classify with this bundle (the folder that gmmvit export writes), without a server.",
    ),
    url: str | None = TARGET.option(
        "URL",
        "Triton server that classifies: grpc://HOST:PORT or http://HOST:PORT; with TLS, grpcs:// or https://.",
        show_default=f"the variable {URL_VARIABLE}, else {_DEFAULT_URL}",
    ),
    key_file: Path | None = KEY_FILE,
    ca: Path | None = CA,
    served_name: str = MODEL_NAME,
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
        autocompletion=completion(IN_PROCESS),
        parser=checked_runner(IN_PROCESS),
        show_default="the choice of gmmvit optimize or gmmvit export for this machine",
    ),
    top: int = OUTPUT.option("N", "Number of classes to print per image.", default=5, min=1),
    features: Path | None = OUTPUT.option(
        "FILE.npz",
        "Also write the features of the images: the arrays features (N, D) and files (N). The bundle needs "
        "features: gmmvit export --outputs features or --outputs both.",
    ),
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
    launcher: _Launcher = _BULK.option(
        "NAME",
        "Who runs the shards of --from. local: worker processes on this machine. ray: tasks of a Ray cluster.",
        default="local",
        names=get_args(_Launcher),
    ),
    shard_images: int = _BULK.option("N", "Maximum number of images in a shard of --from.", default=5000, min=1),
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
    accept_broken: bool = OUTPUT.flag(
        "--accept-broken", "With --from: exit with status 0 even if images are broken. Their rows state the error."
    ),
    force: bool = OUTPUT.flag("--force", "Replace the file of --features if it exists."),
    as_json: bool = AS_JSON,
) -> None:
    """Prints the most likely labels of each image with their probabilities; for a multi-label bundle, the labels that
    reach their thresholds. With --from and --to, writes Parquet files for any number of images. The exit status is 1
    if a file cannot be classified.
    """
    from gmmvit_deploy.bundle.artifacts import open_bundle

    refusals = refusals_of(context)
    if typed(context, _BULK, "accept_broken"):
        from gmmvit_deploy.bulk.run import classify_source, kept_images, part_from

        with refusals.collected():
            if source is None or folder is None or bundle is None:
                option = "--from" if source is None else "--to" if folder is None else "--bundle"
                raise InputError(
                    f"--from, --to and --bundle go together; {option} is missing",
                    hint="type gmmvit classify --bundle BUNDLE --from SOURCE --to FOLDER",
                )
            in_bulk = open_bundle(bundle)
        without: dict[str, object] = {"IMAGE": images, "--url": url, "--key-file": key_file, "--ca": ca}
        without |= {"--features": features, "--force": force}
        for option, value in without.items():
            hint = f"leave {option} out, or name the images without --from"
            refusals.refuse(value, f"{option} does not go with --from", hint=hint)
        with refusals.collected():
            part = (0, 1) if shards is None else part_from(shards)
        refusals.raise_all()
        try:
            with progress("classify") as on_progress:
                result = classify_source(
                    in_bulk,
                    source,
                    folder,
                    runner=runner,
                    launcher=launcher,
                    batch=batch,
                    shard_images=shard_images,
                    image_column=image_column,
                    part=part,
                    workers=workers,
                    on_progress=on_progress,
                )
        except KeyboardInterrupt:
            state = ""
            with suppress(Exception):  # a folder that cannot be read does not replace the interruption
                kept, total = kept_images(folder)
                state = f": {folder} keeps {kept:,} of {counted(total, 'image')}" if kept else ": nothing is kept yet"
            note(f"interrupted{state}; to continue, type the same command again")
            raise typer.Exit(130) from None
        _print_bulk(result, folder, accept_broken=accept_broken, as_json=as_json)
        return
    from gmmvit_deploy.images.data.files import LeftOut, left_out_text
    from gmmvit_deploy.runtimes.runners.classify import (
        BundleClassifier,
        Classification,
        TritonClassifier,
        classify_files,
        write_features,
    )

    with refusals.collected():
        opened = None if bundle is None else open_bundle(bundle)
    refusals.refuse(
        bundle is not None and url is not None,
        "--bundle (classify locally) and --url (ask a server) exclude each other",
        hint="type --bundle or --url, not both",
    )
    refusals.refuse(
        bundle is None and runner is not None,
        "--runner needs --bundle; a running server keeps the runner that it was started with",
        hint=f"type gmmvit serve BUNDLE --runner {runner} to start a server with this runner",
    )
    refusals.refuse(
        features is not None and features.suffix != ".npz",
        f"--features {features}: expected the name of an .npz file",
        hint="type --features FILE.npz",
    )
    left_out = LeftOut()
    with refusals.collected():
        if not images:
            raise InputError("expected images: files, folders or patterns", hint=typing_hint("classify"))
        files, absent = _files_of(images, left_out)
    refusals.raise_all()
    with progress("classify") as on_progress:
        classifier = (
            BundleClassifier(opened, runner=runner)
            if opened is not None
            else TritonClassifier(
                url or os.environ.get(URL_VARIABLE) or _DEFAULT_URL,
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
    answers += [Classification(path=Path(name), runner=classifier.runner, error=why) for name, why in absent.items()]
    if features is not None:
        write_features(features, answers, force=force)
    if classifier.notice:
        note(classifier.notice)
    if as_json:
        print_json([answer.to_json() for answer in answers])
    else:
        _print(answers, classifier.label_set)
    if features is not None:
        note(f"features: {features}")
    if kinds := left_out.kinds():
        note(left_out_text(kinds))
    _require_answers(answers)


def _print(answers: list[Classification], label_set: LabelSet) -> None:
    names = label_set.names
    for answer in answers:
        shown = [
            f"{names[guess.index] if names else guess.label} {guess.probability:.1%}"
            for guess in answer.predictions
            if guess.present
        ]
        again = "  (computed again in float32)" if answer.deferred else ""
        if answer.predictions:
            typer.echo(f"{answer.path}: {'  '.join(shown) or 'no label reaches its threshold'}{again}")


def _require_answers(answers: list[Classification]) -> None:
    failed = [answer for answer in answers if answer.error]
    for answer in failed:
        print_error(f"Error: {answer.path}: {answer.error}")
    if failed:
        print_error(
            f"hint: {len(failed)} of {counted(len(answers), 'file')} could not be classified; repair or remove them"
        )
        raise typer.Exit(1)


def _print_bulk(result: BulkResult, folder: str, *, accept_broken: bool, as_json: bool) -> None:
    from gmmvit_deploy.bulk.run import REPORT
    from gmmvit_deploy.images.data.files import left_out_text

    if as_json:
        print_json(asdict(result))
    else:
        typer.echo(folder)
    for line in result.notes:
        note(line)
    rate = f", {result.classified / result.seconds:,.0f} images/s" if result.classified else ""
    where = f"{counted(result.images, 'image')} in {counted(result.shards, 'shard')}"
    note(f"{where}; {result.classified:,} classified by this run{rate}")
    if result.left_out:
        note(left_out_text(result.left_out))
    if result.complete:
        note(f"report: {folder.rstrip('/')}/{REPORT}")
    else:
        note("other shards of the job are not complete yet")
    if result.errors:
        verb = "is" if result.errors == 1 else "are"
        broken = f"{result.errors:,} of {counted(result.images, 'image')} {verb} broken; the column error states why"
        if accept_broken:
            note(broken)
            return
        print_error(f"Error: {broken}")
        print_error(
            "hint: type --accept-broken to exit with status 0; for repaired images, type --to with a new folder"
        )
        raise typer.Exit(1)


def _files_of(arguments: list[str], left_out: LeftOut) -> tuple[list[Path], dict[str, str]]:
    """Return the files that the arguments name, and argument → why it names none.  Errors: InputError if all do."""
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
