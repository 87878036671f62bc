"""``gmmvit classify --from SOURCE --to FOLDER``: the options and the output of classification in bulk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from gmmvit_cli.choices import choice_from, complete
from gmmvit_cli.options import OUTPUT
from gmmvit_cli.output import complain, note, print_json
from gmmvit_cli.progress import progress
from gmmvit_deploy.errors import InputError

__all__ = [
    "ACCEPT_BROKEN",
    "FOLDER",
    "IMAGE_COLUMN",
    "LAUNCHER",
    "REFERENCE",
    "RUNNER",
    "SHARDS",
    "SHARD_IMAGES",
    "SOURCE",
    "WORKERS",
    "classify_in_bulk",
]

_PANEL = "Millions of images"
_LAUNCHERS = ("local", "ray")
_USUAL_SHARD = 5000

SOURCE = typer.Option(
    None,
    "--from",
    metavar="SOURCE",
    rich_help_panel=_PANEL,
    help="Classify every image of a folder of images, of tar archives (WebDataset), or of Parquet files. SOURCE is a "
    "folder, a file or a pattern in quotes, on a disk or as a URL that fsspec opens, such as s3://bucket/images. Needs "
    "--bundle and --to.",
)
FOLDER = typer.Option(
    None,
    "--to",
    metavar="FOLDER",
    rich_help_panel=_PANEL,
    help="Folder or URL for the results: a Parquet file for each shard, with a row for each image. The same command "
    "again continues an interrupted run.",
)
RUNNER = typer.Option(
    None,
    "--runner",
    metavar="NAME[:PRECISION]",
    rich_help_panel=_PANEL,
    show_default="openvino+kernels if available, else openvino, else onnxruntime",
    help="Runner for --from, such as openvino:bf16.",
)
LAUNCHER = typer.Option(
    "local",
    "--launcher",
    metavar="NAME",
    rich_help_panel=_PANEL,
    help="Who runs the shards of --from. local: worker processes on this machine. ray: tasks of a Ray cluster.",
    callback=choice_from("--launcher", lambda: _LAUNCHERS),
    autocompletion=complete(lambda: _LAUNCHERS),
)
SHARD_IMAGES = typer.Option(
    None,
    "--shard-images",
    min=1,
    metavar="N",
    rich_help_panel=_PANEL,
    show_default=f"{_USUAL_SHARD}",
    help="Maximum number of images in a shard of --from.",
)
WORKERS = typer.Option(
    None,
    "--workers",
    min=1,
    metavar="N",
    rich_help_panel=_PANEL,
    show_default="1 per core; 1 for a GPU",
    help="Worker processes of --launcher local.",
)
SHARDS = typer.Option(
    None,
    "--shards",
    metavar="I/N",
    rich_help_panel=_PANEL,
    show_default="all",
    help="Classify only the shards I, I + N, I + 2N and so on of --from, with I from 0 on; JOB_COMPLETION_INDEX/N "
    "takes I from this variable, which Kubernetes sets in an Indexed Job.",
)
IMAGE_COLUMN = typer.Option(
    None,
    "--image-column",
    metavar="NAME",
    rich_help_panel=_PANEL,
    show_default="the only column of bytes",
    help="Column of Parquet files that holds the bytes or the paths of the images.",
)
REFERENCE = typer.Option(
    None,
    "--calibration",
    metavar="DATA",
    rich_help_panel=_PANEL,
    help="Images like the expected images, named as in gmmvit convert. The report of --from lists images that are "
    "unlike these and the golden images.",
)
ACCEPT_BROKEN = typer.Option(
    False,
    "--accept-broken",
    rich_help_panel=OUTPUT,
    help="With --from: exit with status 0 even if images are broken. Their rows state the error.",
)


def classify_in_bulk(
    *,
    bundle: Path | None,
    source: str | None,
    folder: str | None,
    runner: str | None,
    launcher: str,
    batch: int | None,
    shard_images: int | None,
    workers: int | None,
    shards: str | None,
    image_column: str | None,
    calibration: str | None,
    accept_broken: bool,
    as_json: bool,
    others: dict[str, Any],
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
