from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, get_args

import typer

from gmmvit_cli.commands import collect_garbage_rarely
from gmmvit_cli.models import CLASS_TO_CONVERT, permit_class
from gmmvit_cli.options import AS_JSON, FORCE_REPORT, REPORT, complete_data, of_fields
from gmmvit_cli.output import WIDTH, note, print_json, print_table
from gmmvit_cli.panels import INPUT, Panel, refusals_of
from gmmvit_cli.progress import progress
from gmmvit_deploy.bundle.choices import Goal
from gmmvit_deploy.inference.precision import SPECS
from gmmvit_deploy.neighbours import KEEP_NEIGHBOURS

if TYPE_CHECKING:
    from gmmvit_deploy.bundle.artifacts import Bundle
    from gmmvit_deploy.bundle.choices import Choice

COLLECTS = True
EXAMPLE = """gmmvit optimize bundle --data digits --calibration digits#train
gmmvit optimize bundle --data folder:VAL --for throughput --report page.html"""

_GOAL = Panel("Goal")
_INT8 = SPECS["int8"]


def optimize(
    context: typer.Context,
    bundle: Path = INPUT.argument("BUNDLE", "The bundle to choose for."),
    data: str = INPUT.option(
        "KIND:PATH",
        "Images that judge what a precision costs, as for gmmvit parity --data, such as folder:VAL.",
        default=...,
        autocompletion=complete_data,
    ),
    limit: int = INPUT.option(
        "N", "Maximum number of images of --data that judge, spread evenly over the data.", default=500
    ),
    calibration: str | None = INPUT.option(
        "DATA",
        "Images that set the ranges of static int8, none of which may be among those that judge, as in gmmvit convert. "
        "The split is train unless the text ends with #test. Without them, static and mixed int8 are left out. They "
        "also choose which images a cascade computes again in float32.",
        autocompletion=complete_data,
    ),
    gate: float | None = _GOAL.option(
        "SHARE",
        "What a precision must reach: of PyTorch's accuracy with labelled images, or of the decisions without labels; "
        "for a bundle without logits, of the ten nearest neighbours of each image, by the features.",
        show_default=f"{_INT8.accuracy_gate} with labels, {_INT8.kept_gate} without, {KEEP_NEIGHBOURS} of neighbours",
    ),
    keep_decisions: float | None = _GOAL.option(
        "SHARE",
        "In place of --gate: the share of PyTorch's decisions to keep, also with labelled images, and by a cascade.",
    ),
    goal: Goal = _GOAL.option(
        "NAME", "What to be fast in: latency or throughput.", default="latency", name="--for", names=get_args(Goal)
    ),
    batch: int | None = _GOAL.option(
        "N", "Number of images at a time to measure.", show_default="1 for latency, 16 for throughput"
    ),
    model: str | None = CLASS_TO_CONVERT,
    report: Path | None = REPORT,
    force: bool = FORCE_REPORT,
    as_json: bool = AS_JSON,
) -> None:
    """A bundle is the folder that gmmvit export writes. Every runtime and precision of this machine is tried: what the
    bundle lacks is converted and timed; what could be chosen is checked against PyTorch, held to the gate on the images
    of --data, and timed again, in turn. The choice is written into the bundle, in runners.json, and serve, repository,
    classify and bench take it.
    """
    collect_garbage_rarely()
    with progress("optimize") as on_progress:
        from gmmvit_deploy.bundle.artifacts import open_bundle
        from gmmvit_deploy.optimize.options import OptimizeOptions
        from gmmvit_deploy.runtimes.programs.image_batches import require_images

        refusals = refusals_of(context)
        with refusals.collected():
            options = OptimizeOptions(**of_fields(OptimizeOptions, context.params))
        with refusals.collected():
            opened = open_bundle(bundle)
        refusals.raise_all()
        if calibration is not None:
            require_images(calibration, opened.manifest.image, opened.manifest.input_kind)

        # Imports PyTorch: what is wrong is refused without it.
        from gmmvit_deploy.optimize.page import write_page
        from gmmvit_deploy.optimize.run import optimize_bundle

        permit_class(opened, model)
        choice = optimize_bundle(opened, options, on_progress=on_progress)
        if report is not None:
            write_page(choice, opened, report, force=force)
    if as_json:
        print_json(choice.to_json())
    else:
        _print(choice, opened)
    if report is not None:
        note(f"report: {report}")


def _print(choice: Choice, bundle: Bundle) -> None:
    from gmmvit_deploy.optimize.table import cascades_of, could_pass, head_of, left_out_rows, passed_rows, reasons_of

    title = f"{bundle.path}: {choice.goal} at batch {choice.batch} on {choice.machine}"
    runner, speed, batch, accuracy, *shares = head_of(choice)
    speed, shares = speed.replace(", ", ",\n"), [share.replace(" ", "\n") for share in shares]
    # The page has the intervals of the shares, for which a line has no room.
    passed = [(*row[:4], *(share.partition(" ")[0] for share in row[4:])) for row in passed_rows(choice)]
    print_table((runner, speed, batch, accuracy, *shares), passed, title=title, width=WIDTH)
    if rows := [(name, ratio, why) for name, ratio, *_, why in left_out_rows(choice)]:
        print_table((runner, speed, "left out because"), rows, width=WIDTH)
    if reasons := reasons_of(choice):
        print_table(("not tried", "because"), reasons, width=WIDTH)
    for sentence in cascades_of(choice, bundle):
        typer.echo(sentence)
    typer.echo(f"judged on {choice.images}")
    if more := could_pass(choice, bundle.path):
        typer.echo(more)
    typer.echo(f"chosen: {choice.passed[0].runner}")
