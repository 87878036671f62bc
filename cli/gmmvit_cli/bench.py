from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from gmmvit_cli.options import AS_JSON, DATA, REPORT, of_fields
from gmmvit_cli.output import note, print_json, print_table
from gmmvit_cli.panels import INPUT, OUTPUT, Panel, refusals_of
from gmmvit_cli.progress import progress
from gmmvit_cli.runners import opened_runners, options_of_runners, runner_option
from gmmvit_deploy.errors import InputError

COLLECTS = True
SHARED = (options_of_runners,)
EXAMPLE = """gmmvit bench bundle --data digits --report bench.html
gmmvit bench bundle --runner eager,openvino --synthetic --output a.json
gmmvit bench --compare a.json b.json"""

_MEASUREMENT = Panel("Measurement")


def bench(
    context: typer.Context,
    bundle: Path | None = INPUT.argument("BUNDLE", "The bundle to measure. Leave it out with --compare.", default=None),
    data: str | None = DATA,
    synthetic: bool = INPUT.flag(
        "--synthetic", "Measure on generated random inputs instead of --data. The result records this choice."
    ),
    samples: int = INPUT.option("N", "Number of different inputs to measure with.", default=256),
    compare: tuple[Path, Path] | None = INPUT.option(
        "A.json B.json",
        "Measure nothing; compare two files that --output wrote, and list what is faster or slower in B.",
    ),
    runner: Sequence[str] | None = runner_option(
        "eager, onnxruntime, openvino+kernels if available, and the choice of gmmvit optimize or export",
        "Runners to measure",
    ),
    batch: str = _MEASUREMENT.option("LIST", "Batch sizes to measure, separated by commas.", default="1,8,64"),
    rounds: int = _MEASUREMENT.option("N", "Number of rounds; each round measures every runner.", default=10),
    seconds: float = _MEASUREMENT.option(
        "S", "Approximate measuring time for each runner and batch size, over all rounds.", default=4.0
    ),
    bound_ms: float | None = _MEASUREMENT.option(
        "MS",
        "Also find the highest request rate at which the p99 latency stays within MS milliseconds. Requests "
        "arrive at random times (Poisson); 99% of requests are faster than the p99 latency.",
    ),
    roofline: bool = _MEASUREMENT.flag(
        "--roofline/--no-roofline",
        "Also measure the machine's peak compute and memory rates, and report how close each runner comes.",
        default=True,
    ),
    output: Path | None = OUTPUT.option("FILE.json", "Write the result with a run card: machine, versions, settings."),
    report: Path | None = REPORT,
    force: bool = OUTPUT.flag("--force", "Replace the result and the report if they exist."),
    as_json: bool = AS_JSON,
) -> None:
    """A bundle is the folder that gmmvit export writes. A runner is a program that computes the logits, such as
    PyTorch, ONNX Runtime, an engine or a server. The runners take turns; MLPerf LoadGen sends the queries. Ratios are
    relative to the first runner. The exit status is 1 if the logits of a runner are wrong.
    """
    refusals, images = refusals_of(context), None
    if compare is not None:
        refusals.raise_all()
        _compare(*compare, bundle=bundle, as_json=as_json)
        return
    with progress("bench") as on_progress:
        from gmmvit_deploy.bench.cells import Plan
        from gmmvit_deploy.bench.page import write_page
        from gmmvit_deploy.bench.run import BenchOptions, bench
        from gmmvit_deploy.bundle.artifacts import open_bundle
        from gmmvit_deploy.files.writing import new_file
        from gmmvit_deploy.images.data.open import open_data

        with refusals.collected():
            if (data is None) != synthetic:
                raise InputError(
                    "expected images with --data, or --synthetic for generated inputs",
                    hint="type --data digits, --data cifar10:PATH, --data folder:PATH or --synthetic",
                )
            images = open_data(data) if data else None
        with refusals.collected():
            options = BenchOptions(
                plan=Plan(batches=_batches(batch), rounds=rounds, seconds=seconds),
                **{**of_fields(BenchOptions, context.params), "data": images},
            )
        with refusals.collected():
            if bundle is None:
                usage = EXAMPLE.splitlines()[0]
                raise InputError("expected a bundle, or --compare A.json B.json", hint=f"type {usage}")
            opened = open_bundle(bundle)
        refusals.raise_all()
        with opened_runners(opened, context.params, first=("eager",), timed=True) as (runners, _):
            measured = bench(opened, runners, options, on_progress=on_progress)
        result = measured.to_json()
        if output is not None:
            with new_file(output, force=force) as file:
                file.write((json.dumps(result, allow_nan=False) + "\n").encode())
        if report is not None:
            write_page(result, report, force=force)
    if as_json:
        print_json(result)
    else:
        _print(result)
    for what, path in (("result", output), ("report", report)):
        if path is not None:
            note(f"{what}: {path}")
    if measured.wrong:
        raise typer.Exit(1)


def _batches(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as exc:
        raise InputError(
            f"--batch: expected numbers separated by commas, got {text!r}", hint="type --batch 1,8,64"
        ) from exc


def _print(result: dict[str, Any]) -> None:
    from gmmvit_deploy.bench.page import percentile_words, roofline_words

    shares = {(share["runner"], share["batch"]): f"{share['share']:.0%}" for share in result["shares"]}
    ratios = {(ratio["runner"], ratio["scenario"], ratio["batch"]): ratio for ratio in result["ratios"]}
    rows = []
    for cell in result["cells"]:
        timed = cell["scenario"] != "Offline"
        ratio = ratios.get((cell["runner"], cell["scenario"], cell["batch"]))
        rows.append(
            (
                cell["runner"],
                cell["scenario"],
                str(cell["batch"]),
                f"{cell['median_ms']:.3f}" if timed else "",
                percentile_words(cell, "p90"),
                percentile_words(cell, "p99"),
                f"{cell['samples_per_second']:,.0f}",
                f"{ratio['value']:.2f} ({ratio['low']:.2f}–{ratio['high']:.2f})" if ratio else "",
                shares.get((cell["runner"], cell["batch"]), "") if timed else "",
                "right" if cell["outputs"]["right"] else "WRONG",
            )
        )
    first_name = result["cells"][0]["runner"]
    head = (
        "runner",
        "scenario",
        "batch",
        "median ms",
        "p90 ms",
        "p99 ms",
        "images/s",
        f"time / {first_name}",
        "of peak",
        "logits",
    )
    print_table(head, rows, title=str(result["bundle"]["path"]))
    for line in result["rooflines"]:
        typer.echo(f"peak rates: {roofline_words(line)}")
    for step in result["waterfall"]:
        parts = ", ".join(f"{name} {ms:.3f}" for name, ms in step["parts"].items())
        typer.echo(f"single image: {step['name']}: {step['ms']:.3f} ms{': ' + parts if parts else ''}")
    for load in result["loads"]:
        best = load["best"]
        reached = (
            f"{best['rate']:,.0f} requests/s, p99 {best['p99_ms']:.2f} ms"
            if best
            else "no tested rate stays within the limit"
        )
        typer.echo(f"p99 within {load['bound_ms']:g} ms: {load['runner']}: {reached}")
    for skipped in result["skipped"]:
        typer.echo(f"skipped: {skipped}")
    for reason in result["reasons"]:
        typer.echo(f"invalid: {reason}")
    typer.echo(result["verdict"])


def _compare(first: Path, second: Path, *, bundle: Path | None, as_json: bool) -> None:
    from gmmvit_deploy.bench.compare import compare, open_result

    if bundle is not None:
        raise InputError(
            f"--compare compares two result files and measures no bundle, got the bundle {bundle}",
            hint="type gmmvit bench --compare A.json B.json",
        )
    rows, differing = compare(open_result(first), open_result(second))
    if as_json:
        print_json({"rows": [asdict(row) for row in rows], "differing": differing})
        return
    cells = [
        (
            row.runner,
            row.scenario,
            str(row.batch),
            f"{row.a_ms:.3f}",
            f"{row.b_ms:.3f}",
            f"{row.change.value:.3f} ({row.change.low:.3f}–{row.change.high:.3f})",
            ("slower" if row.change.value > 1 else "faster") if row.certain else "not clearly different",
        )
        for row in rows
    ]
    print_table(("runner", "scenario", "batch", "A ms", "B ms", "B / A", "B is"), cells)
    for name, (a, b) in differing.items():
        typer.echo(f"differs: {name}: {a} in A, {b} in B")
    typer.echo("A and B were measured at different times: the change includes any change of the machine")
