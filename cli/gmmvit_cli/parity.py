from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from gmmvit_cli.output import JSON_OPTION, note, phases, print_json, print_table

if TYPE_CHECKING:
    from gmmvit_deploy.parity.report import ParityReport


def _print_schema(wanted: bool) -> None:
    if wanted:
        from gmmvit_deploy.parity.report import SCHEMA_PATH

        typer.echo(SCHEMA_PATH.read_text(encoding="utf-8"), nl=False)
        raise typer.Exit


def parity(
    bundle: Path = typer.Argument(help="A bundle that gmmvit export wrote."),
    runner: str | None = typer.Option(
        None,
        help="One or several, with commas: eager, eager-gpu, compile, compile-gpu, onnxruntime, onnxruntime+kernels, "
        "openvino, openvino+kernels, tensorrt, tensorrt-rtx, triton-grpc, triton-http; a precision behind a colon, as "
        "in openvino:bf16.  [default: onnxruntime, and onnxruntime+kernels where our CPU kernels can be had]",
    ),
    precision: str = typer.Option(
        "fp32",
        help="Of onnxruntime (fp32, fp16, int8) and openvino (fp32, bf16, int8), where their names do not say it.",
    ),
    engine: Path | None = typer.Option(None, help="An engine that gmmvit build wrote, for the two TensorRTs."),
    url: list[str] = typer.Option(
        [], help="A Triton server: grpc://host:port or http://host:port; once for each protocol."
    ),
    model: str = typer.Option("gmmvit", help="Name that the repository gave the model on the server."),
    data: str | None = typer.Option(
        None,
        help="Labelled images: cifar10:PATH, cifar100:, svhn:, mnist:, tiny-imagenet:, folder:, array:, or digits; "
        "#train or #test behind it.",
    ),
    limit: int | None = typer.Option(None, help="How many of the images, spread evenly. Default: all."),
    on_broken: str = typer.Option("fail", help="A broken image in the data: fail, or skip (named and counted)."),
    gate: float | None = typer.Option(
        None, help="Share of PyTorch's top-1 that is wanted. Default: 0.999, and 0.99 for int8 and fp8."
    ),
    require_accuracy: bool = typer.Option(
        False, "--require-accuracy", help="Fail too when there were no images, or too few to tell."
    ),
    localize: bool = typer.Option(False, "--localize", help="The error block by block, and the first that drifts."),
    report: Path | None = typer.Option(None, help="Write a self-contained page with plots: FILE.html."),
    force: bool = typer.Option(False, "--force", help="Replace the report if it exists."),
    as_json: bool = JSON_OPTION,
    schema: bool = typer.Option(
        False, "--schema", callback=_print_schema, is_eager=True, help="Print the JSON schema of --json."
    ),
) -> None:
    """Is what runs the model that was trained?  Numbers, decisions, accuracy, batches; exit with 1 if a check fails."""
    with phases("parity") as told:
        from gmmvit_deploy.artifacts import open_bundle
        from gmmvit_deploy.pages import require_page
        from gmmvit_deploy.parity.check import ParityOptions, check_parity
        from gmmvit_deploy.parity.inputs import open_images_of
        from gmmvit_deploy.parity.page import write_page
        from gmmvit_deploy.precision import precision_from
        from gmmvit_deploy.runners.open import default_runners, open_runners

        if report is not None:
            require_page(report, force=force)  # not after half an hour of images
        options = ParityOptions(
            data=open_images_of(data) if data else None,
            limit=limit,
            on_broken=on_broken,  # type: ignore[arg-type]  # checked there
            gate=gate,
            localize=localize,
        )
        opened = open_bundle(bundle)
        wanted = precision_from(precision)
        skipped: list[str] = []
        if runner is None:
            names, skipped = default_runners(opened, wanted)
        else:
            names = [name.strip() for name in runner.split(",")]
        settings: dict[str, Any] = {"urls": url, "model": model, "engine": engine, "takes_other_bundle": True}
        with open_runners(names, opened, precision=wanted, **settings) as runners:
            found = check_parity(opened, runners, options, skipped=skipped, told=told)
        if report is not None:
            write_page(found, report, force=force)
    if as_json:
        print_json(found.to_json())
    else:
        _print(found)
    if report is not None:
        note(f"report: {report}")
    missing = found.undecided("accuracy") if require_accuracy else []
    if found.failed or missing:
        for check in missing:
            note(f"--require-accuracy: {'; '.join(check.reasons)}")
        raise typer.Exit(1)


_MOST_REASONS = 8


def _print(found: ParityReport) -> None:
    of_bundle = [("bundle", "", check) for check in found.checks]
    of_runners = [(one.runner, one.precision, check) for one in found.runners for check in one.checks]
    rows = [
        (who, precision, check.name, check.verdict.upper() if check.verdict == "failed" else check.verdict, check.says)
        for who, precision, check in of_bundle + of_runners
    ]
    print_table(("runner", "", "check", "", "what was seen"), rows, title=str(found.bundle["path"]))
    for reason in found.skipped:
        typer.echo(f"skipped: {reason}")
    sets = [numbers for one in found.runners for numbers in one.check("numeric").details["sets"]]
    limits = [f"limit on {one['inputs']}: {one['limit']['largest']:.2g} = {one['limit']['derivation']}" for one in sets]
    for line in dict.fromkeys(limits):
        typer.echo(line)
    for one in found.runners:
        _print_flips(one.check("decisions").details)
    if found.data is not None and found.data["broken"]:
        shown = "".join(f"\n  {one['image']}: {one['why']}" for one in found.data["broken_images"])
        typer.echo(f"skipped {found.data['broken']} broken images of {found.data['of']:,}:{shown}")
    told = {check.name for *_, check in of_bundle + of_runners if check.verdict == "failed"}
    for who, _, check in of_bundle + of_runners:
        if check.verdict in ("failed", "undecided"):
            for why in check.reasons[:_MOST_REASONS]:
                typer.echo(f"{check.verdict}: {who}: {check.name}: {why}")
            if len(check.reasons) > _MOST_REASONS:
                typer.echo(
                    f"{check.verdict}: {who}: {check.name}: and {len(check.reasons) - _MOST_REASONS} more (--json)"
                )
    words = {
        "passed": "passed",
        "failed": f"FAILED: {', '.join(sorted(told))}",
        "undecided": "passed, but not all could be told",
    }
    typer.echo(words[found.verdict])


def _print_flips(decisions: Mapping[str, Any]) -> None:
    for flip in decisions["flips"][:_MOST_REASONS]:
        kind = "within the noise" if flip["within_noise"] else "WRONG"
        typer.echo(
            f"flip, {kind}: {flip['where']}: {flip['wanted']} became {flip['found']}, margin {flip['margin']:.3g}"
        )
    more = len(decisions["flips"]) + decisions["flips_not_listed"] - _MOST_REASONS
    if more > 0:
        typer.echo(f"and {more} flips more")
