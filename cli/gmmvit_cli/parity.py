from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import typer

from gmmvit_cli.commands import collect_garbage_rarely
from gmmvit_cli.options import AS_JSON, DATA, FORCE_REPORT, REPORT, of_fields
from gmmvit_cli.output import WIDTH, note, print_error, print_json, print_table, verbosity
from gmmvit_cli.panels import GENERAL, INPUT, Panel, refusals_of
from gmmvit_cli.progress import progress
from gmmvit_cli.runners import opened_runners, options_of_runners, runner_option
from gmmvit_deploy.inference.precision import QUANTIZED, SPECS
from gmmvit_deploy.neighbours import KEEP_NEIGHBOURS

if TYPE_CHECKING:
    from gmmvit_deploy.parity.report import ParityReport, RunnerReport

COLLECTS = True
SHARED = (options_of_runners,)
EXAMPLE = """gmmvit parity bundle
gmmvit parity bundle --runner openvino:bf16 --data digits --report parity.html"""

_CHECKS = Panel("Checks")
_OnBroken = Literal["fail", "skip"]
_NOT_JUDGED = 3
_MAX_REASONS = 8


def _print_schema(requested: bool) -> None:
    if requested:
        from gmmvit_deploy.parity.report import SCHEMA_PATH

        typer.echo(SCHEMA_PATH.read_text(encoding="utf-8"), nl=False)
        raise typer.Exit


def parity(
    context: typer.Context,
    bundle: Path = INPUT.argument("BUNDLE", "The bundle to check."),
    data: str | None = DATA,
    limit: int | None = INPUT.option("N", "Maximum number of images, spread evenly over the data.", show_default="all"),
    on_broken: _OnBroken = INPUT.option(
        "ACTION",
        "Action if an image of the data cannot be read: fail, or skip the image and report it.",
        default="fail",
        names=get_args(_OnBroken),
    ),
    runner: Sequence[str] | None = runner_option(
        "onnxruntime, openvino+kernels if available, and the choice of gmmvit optimize",
        "Runners to compare with PyTorch",
    ),
    gate: float | None = _CHECKS.option(
        "FRACTION",
        "Minimum accuracy to pass, as a fraction of PyTorch's, in top-1 and, with more than five classes, top-5.",
        show_default=f"{SPECS['fp32'].accuracy_gate}, but {SPECS['int8'].accuracy_gate} for {' and '.join(QUANTIZED)}",
    ),
    keep_decisions: float | None = _CHECKS.option(
        "FRACTION",
        "Minimum share of the images of --data for which the runner predicts PyTorch's class.",
        show_default=f"{SPECS['int8'].kept_gate} for {' and '.join(QUANTIZED)}",
    ),
    keep_neighbours: float | None = _CHECKS.option(
        "FRACTION",
        "Minimum share of the ten nearest neighbours of each image of --data, by the cosine of the features, that are "
        "PyTorch's.",
        show_default=f"{KEEP_NEIGHBOURS} without logits, but for float32",
    ),
    snr_db: float | None = _CHECKS.option(
        "DB",
        "Minimum signal-to-noise ratio of the runner's logits on the images of --data.",
        show_default="no minimum",
    ),
    least_cosine: float | None = _CHECKS.option(
        "COSINE",
        "Minimum cosine between the runner's and PyTorch's features of each image of --data, or between their logits "
        "if the bundle has no features. Not centred.",
        show_default="no minimum",
    ),
    expected_accuracy: float | None = _CHECKS.option(
        "FRACTION",
        "Accuracy that training measured on such images, such as 0.93. Fail if PyTorch's accuracy on the images of "
        "--data is below it: then preprocessing, labels or weights are not those of training.",
        name="--expect-accuracy",
    ),
    require_accuracy: bool = _CHECKS.flag(
        "--require-accuracy", "Also fail if accuracy cannot be decided: no labelled images, or too few."
    ),
    localize: bool = _CHECKS.flag(
        "--localize",
        "Compare the output of every transformer block with PyTorch, and name the first block outside the tolerance.",
    ),
    report: Path | None = REPORT,
    force: bool = FORCE_REPORT,
    as_json: bool = AS_JSON,
    schema: bool = GENERAL.flag(
        "--schema", "Print the JSON schema of the --json output, and exit.", is_eager=True, callback=_print_schema
    ),
) -> None:
    """A bundle is the folder that gmmvit export writes. A runner is a program that computes the logits, such as ONNX
    Runtime, an engine or a server. All runners and PyTorch get the inputs recorded at export, random inputs, and the
    images of --data. What failed or is undecided is printed first, then a line for each runner; --verbose prints every
    check. The exit status is 1 if a check fails, or if the images cannot decide a gate that you type; and 3 if nothing
    failed, but no images judged an int8 or fp8 graph.
    """
    collect_garbage_rarely()
    with progress("parity") as on_progress:
        from gmmvit_deploy.bundle.artifacts import open_bundle
        from gmmvit_deploy.parity.options import ParityOptions

        refusals = refusals_of(context)
        with refusals.collected():
            options = ParityOptions(**of_fields(ParityOptions, context.params))
        with refusals.collected():
            opened = open_bundle(bundle)
        refusals.raise_all()

        # Imports PyTorch: what is wrong is refused without it.
        from gmmvit_deploy.parity.check import check_parity
        from gmmvit_deploy.parity.choice import with_choice
        from gmmvit_deploy.parity.page import write_page

        with opened_runners(opened, context.params, takes_other_bundle=True) as (runners, skipped):
            result = check_parity(opened, runners, options, skipped=skipped, on_progress=on_progress)
        result = with_choice(opened, result)
        if report is not None:
            write_page(result, report, force=force)
    typed = {
        "--gate": gate,
        "--require-accuracy": require_accuracy or None,
        "--keep-decisions": keep_decisions,
        "--keep-neighbours": keep_neighbours,
        "--snr-db": snr_db,
        "--least-cosine": least_cosine,
    }
    undecided = result.undecided(option for option, value in typed.items() if value is not None)
    if as_json:
        print_json(result.to_json())
    else:
        _print(result, decided=not undecided)
    if report is not None:
        note(f"report: {report}")
    if result.failed or undecided:
        for line in undecided:
            print_error(f"not decided: {line}")
        raise typer.Exit(1)
    if result.not_judged:
        raise typer.Exit(_NOT_JUDGED)


def _print(report: ParityReport, *, decided: bool) -> None:
    """Print what did not pass, a line for each runner, with ``--verbose`` all checks, and at the end the verdict."""
    for line in report.reasons("failed", _MAX_REASONS):
        typer.echo(f"failed: {line}")
    for line in report.reasons("undecided", _MAX_REASONS):
        typer.echo(f"undecided: {line}")
    columns = ("runner", "verdict", "logits differ by", "same answer", "right, PyTorch's")
    print_table(columns, list(map(_row, report.runners)), title=str(report.bundle["path"]), width=WIDTH)
    if report.data is not None and report.data["broken"]:
        shown = "".join(f"\n  {image['image']}: {image['why']}" for image in report.data["broken_images"])
        typer.echo(f"skipped {report.data['broken']} of {report.data['of']:,} images, which cannot be read:{shown}")
    for line in filter(None, (report.left_out(), report.more_images)):
        typer.echo(line)
    if verbosity() == "verbose":
        for line in _details(report):
            typer.echo(line)
    ran = sum(check.verdict != "skipped" for _, check in report.all_checks)
    skipped = len(report.all_checks) - ran + len(report.skipped)
    typer.echo(f"checks: {ran} ran, {skipped} skipped; --verbose prints all")
    if report.failed:
        failed = {check.name for _, check in report.all_checks if check.verdict == "failed"}
        typer.echo(f"FAILED: {', '.join(sorted(failed))}")
    elif not decided:
        typer.echo("NOT DECIDED: the images cannot decide a gate")
    elif report.not_judged:
        typer.echo("NOT JUDGED ON IMAGES: nothing failed, but only images show what int8 and fp8 cost")
    else:
        typer.echo("passed" if report.passed else "passed, but some checks are undecided")


def _row(runner: RunnerReport) -> tuple[str, ...]:
    numbers = runner.nearest_to_limit
    share = numbers["from_exact"]["largest"] / numbers["limit"]["largest"]  # NaN for logits of another shape
    decisions, accuracy = runner.check("decisions").details, runner.check("accuracy").details
    both = accuracy.get("top1") or accuracy.get("all_right")
    return (
        runner.name,
        runner.verdict.upper() if runner.verdict == "failed" else runner.verdict,
        "not comparable" if math.isnan(share) else f"{share:.0%} of the limit",
        f"{round(decisions['agreement'] * decisions['inputs']):,} of {decisions['inputs']:,}" if decisions else "",
        f"{both['runner']:.2%}, {both['pytorch']:.2%}" if both else "",
    )


def _details(report: ParityReport) -> Iterator[str]:
    for who, check in report.all_checks:
        yield f"{check.verdict}: {who}: {check.name}: {check.summary}"
        for flip in check.details.get("flips", ()):
            yield (
                f"prediction change, {'within the noise' if flip['within_noise'] else 'WRONG'}: {who}: "
                f"{flip['where']}: {flip['pytorch_class']} became {flip['runner_class']}, margin {flip['margin']:.3g}"
            )
    yield from (f"skipped: {reason}" for reason in report.skipped)
