from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from gmmvit_cli.access import CA, KEY_FILE, access_from, default_urls
from gmmvit_cli.choices import choice_from, complete
from gmmvit_cli.garbage import collect_rarely
from gmmvit_cli.models import CLASS_OF_BUNDLE, permit_class
from gmmvit_cli.options import DATA, ENGINE, INPUT, OUTPUT, SERVED_NAME, require_output_file
from gmmvit_cli.output import JSON_OPTION, MESSAGES, complain, note, print_json, print_table
from gmmvit_cli.progress import progress
from gmmvit_cli.runners import URLS, runner_names, runner_option, runner_precision_option

if TYPE_CHECKING:
    from gmmvit_deploy.parity.report import ParityReport

EXAMPLE = """gmmvit parity bundle
gmmvit parity bundle --runner openvino:bf16 --data digits --report parity.html"""

_CHECKS = "Checks"
_ON_BROKEN = ("fail", "skip")


def _print_schema(requested: bool) -> None:
    if requested:
        from gmmvit_deploy.parity.report import SCHEMA_PATH

        typer.echo(SCHEMA_PATH.read_text(encoding="utf-8"), nl=False)
        raise typer.Exit


def parity(
    bundle: Path = typer.Argument(metavar="BUNDLE", rich_help_panel=INPUT, help="The bundle to check."),
    data: str | None = DATA,
    limit: int | None = typer.Option(
        None,
        metavar="N",
        rich_help_panel=INPUT,
        show_default="all",
        help="Maximum number of images, spread evenly over the data.",
    ),
    on_broken: str = typer.Option(
        "fail",
        metavar="ACTION",
        rich_help_panel=INPUT,
        help="Action if an image of the data cannot be read: fail, or skip the image and report it.",
        callback=choice_from("--on-broken", lambda: _ON_BROKEN),
        autocompletion=complete(lambda: _ON_BROKEN),
    ),
    runner: str | None = runner_option(
        None, "onnxruntime, and openvino+kernels if available", "Runners to compare with PyTorch"
    ),
    precision: str = runner_precision_option(),
    engine: Path | None = ENGINE,
    url: list[str] = URLS,
    key_file: Path | None = KEY_FILE,
    ca: Path | None = CA,
    served_name: str = SERVED_NAME,
    model: str | None = CLASS_OF_BUNDLE,
    gate: float | None = typer.Option(
        None,
        metavar="FRACTION",
        rich_help_panel=_CHECKS,
        show_default="0.999, but 0.99 for int8 and fp8",
        help="Minimum top-1 accuracy to pass, as a fraction of PyTorch's top-1 accuracy.",
    ),
    require_accuracy: bool = typer.Option(
        False,
        "--require-accuracy",
        rich_help_panel=_CHECKS,
        help="Also fail if accuracy cannot be decided: no labelled images, or too few.",
    ),
    localize: bool = typer.Option(
        False,
        "--localize",
        rich_help_panel=_CHECKS,
        help="Compare the output of every transformer block with PyTorch, and name the first block outside the "
        "tolerance.",
    ),
    report: Path | None = typer.Option(
        None, metavar="FILE.html", rich_help_panel=OUTPUT, help="Write a self-contained HTML page with plots."
    ),
    force: bool = typer.Option(False, "--force", rich_help_panel=OUTPUT, help="Replace the report if it exists."),
    as_json: bool = JSON_OPTION,
    schema: bool = typer.Option(
        False,
        "--schema",
        callback=_print_schema,
        is_eager=True,
        rich_help_panel=MESSAGES,
        help="Print the JSON schema of the --json output, and exit.",
    ),
) -> None:
    """A bundle is the folder that gmmvit export writes. A runner is a program that computes the logits, such as ONNX
    Runtime, an engine or a server. All runners and PyTorch get the inputs recorded at export, random inputs, and the
    images of --data. The exit status is 1 if a check fails.
    """
    require_output_file(report, force=force)
    collect_rarely()
    with progress("parity") as on_progress:
        from gmmvit_deploy.bundle.artifacts import open_bundle
        from gmmvit_deploy.parity.inputs import open_images_of
        from gmmvit_deploy.reports.pages import require_page

        if report is not None:
            require_page(report, force=force)  # not after half an hour of images
        images = open_images_of(data) if data else None
        opened = open_bundle(bundle)
        permit_class(opened, model)

        # Imports PyTorch: a bundle that is missing is refused without it.
        from gmmvit_deploy.parity.check import ParityOptions, check_parity
        from gmmvit_deploy.parity.page import write_page
        from gmmvit_deploy.precision import precision_from
        from gmmvit_deploy.runtimes.runners.open import open_runners

        runner_precision = precision_from(precision)
        options = ParityOptions(
            data=images,
            limit=limit,
            on_broken=on_broken,  # type: ignore[arg-type]  # checked by its callback
            gate=gate,
            localize=localize,
        )
        names, skipped = runner_names(runner, opened, runner_precision)
        settings: dict[str, Any] = {
            "urls": default_urls(url, names),
            "model": served_name,
            "access": access_from(key_file, ca),
            "engine": engine,
            "takes_other_bundle": True,
        }
        with open_runners(names, opened, precision=runner_precision, **settings) as runners:
            result = check_parity(opened, runners, options, skipped=skipped, on_progress=on_progress)
        if report is not None:
            write_page(result, report, force=force)
    if as_json:
        print_json(result.to_json())
    else:
        _print(result)
    if report is not None:
        note(f"report: {report}")
    missing = result.undecided("accuracy") if require_accuracy else []
    if result.failed or missing:
        for check in missing:
            complain(f"--require-accuracy: {'; '.join(check.reasons)}")
        raise typer.Exit(1)


_MOST_REASONS = 8


def _print(report: ParityReport) -> None:
    of_bundle = [("bundle", "", check) for check in report.checks]
    of_runners = [(runner.runner, runner.precision, check) for runner in report.runners for check in runner.checks]
    rows = [
        (
            who,
            precision,
            check.name,
            check.verdict.upper() if check.verdict == "failed" else check.verdict,
            check.summary,
        )
        for who, precision, check in of_bundle + of_runners
    ]
    print_table(("runner", "precision", "check", "verdict", "result"), rows, title=str(report.bundle["path"]))
    for reason in report.skipped:
        typer.echo(f"skipped: {reason}")
    for line in dict.fromkeys(_limits(report)):
        typer.echo(line)
    for runner in report.runners:
        _print_flips(runner.check("decisions").details)
    if report.data is not None and report.data["broken"]:
        shown = "".join(f"\n  {image['image']}: {image['why']}" for image in report.data["broken_images"])
        typer.echo(f"skipped {report.data['broken']} of {report.data['of']:,} images, which cannot be read:{shown}")
    for who, _, check in of_bundle + of_runners:
        if check.verdict in ("failed", "undecided"):
            for why in check.reasons[:_MOST_REASONS]:
                typer.echo(f"{check.verdict}: {who}: {check.name}: {why}")
            if len(check.reasons) > _MOST_REASONS:
                typer.echo(
                    f"{check.verdict}: {who}: {check.name}: {len(check.reasons) - _MOST_REASONS} more reasons; "
                    "--json lists all"
                )
    failed = {check.name for *_, check in of_bundle + of_runners if check.verdict == "failed"}
    words = {
        "passed": "passed",
        "failed": f"FAILED: {', '.join(sorted(failed))}",
        "undecided": "passed, but some checks are undecided",
    }
    typer.echo(words[report.verdict])


def _limits(report: ParityReport) -> list[str]:
    sets = [numbers for runner in report.runners for numbers in runner.check("numeric").details["sets"]]
    return [
        f"limit on {numbers['inputs']}: {numbers['limit']['largest']:.2g} = {numbers['limit']['derivation']}"
        for numbers in sets
    ]


def _print_flips(decisions: Mapping[str, Any]) -> None:
    if not decisions:  # a bundle without logits
        return
    for flip in decisions["flips"][:_MOST_REASONS]:
        kind = "within the noise" if flip["within_noise"] else "WRONG"
        typer.echo(
            f"flip, {kind}: {flip['where']}: {flip['pytorch_class']} became {flip['runner_class']}, "
            f"margin {flip['margin']:.3g}"
        )
    more = len(decisions["flips"]) + decisions["flips_not_listed"] - _MOST_REASONS
    if more > 0:
        typer.echo(f"{more} more flips")
