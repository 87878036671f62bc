from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from gmmvit_cli.output import JSON_OPTION, note, phases, print_json, print_table
from gmmvit_deploy.errors import InputError

if TYPE_CHECKING:
    from gmmvit_deploy.bench.compare import Comparison


def bench(
    bundle: Path | None = typer.Argument(None, help="A bundle that gmmvit export wrote; none with --compare."),
    runner: str = typer.Option(
        "eager,onnxruntime",
        help="With commas, the first is what ratios are over: eager, eager-gpu, compile, compile-gpu, onnxruntime, "
        "onnxruntime+kernels, openvino, openvino+kernels, tensorrt, tensorrt-rtx, triton-grpc, triton-http; a "
        "precision behind a colon, as in openvino:bf16.",
    ),
    batch: str = typer.Option("1,8,64", help="Batches, with commas."),
    rounds: int = typer.Option(10, help="Turns that every runner gets."),
    seconds: float = typer.Option(4.0, help="About how long every runner is measured at every batch, in all."),
    bound_ms: float | None = typer.Option(
        None, help="Search the rate of Poisson arrivals at which the p99 latency stays below this."
    ),
    data: str | None = typer.Option(None, help="Images, as for gmmvit parity: cifar10:PATH, folder:PATH, digits, …"),
    synthetic: bool = typer.Option(False, "--synthetic", help="Make inputs up instead of --data; the card says so."),
    samples: int = typer.Option(256, help="How many inputs are kept in memory and drawn from."),
    precision: str = typer.Option("fp32", help="Of onnxruntime and openvino, where their names do not say it."),
    engine: Path | None = typer.Option(None, help="An engine that gmmvit build wrote, for the two TensorRTs."),
    url: list[str] = typer.Option(
        [], help="A Triton server: grpc://host:port or http://host:port; once for each protocol."
    ),
    model: str = typer.Option("gmmvit", help="Name that the repository gave the model on the server."),
    roofline: bool = typer.Option(True, help="Measure what this machine allows, and each runner as a share of it."),
    waterfall: bool = typer.Option(True, help="Take the time of one image apart, step by step."),
    output: Path | None = typer.Option(None, help="Write the result with its run card: FILE.json."),
    report: Path | None = typer.Option(None, help="Write a self-contained page with plots: FILE.html."),
    compare: tuple[Path, Path] | None = typer.Option(
        None, help="Two results: what became faster or slower from A to B.", metavar="A.json B.json"
    ),
    force: bool = typer.Option(False, "--force", help="Replace output and report if they exist."),
    as_json: bool = JSON_OPTION,
) -> None:
    """Latency and throughput, side by side, by the rules of MLPerf LoadGen; exit with 1 if answers were wrong."""
    if compare is not None:
        _compare(*compare, bundle=bundle, as_json=as_json)
        return
    if bundle is None:
        raise InputError("a bundle was wanted, or --compare A.json B.json")
    if (data is None) != synthetic:
        raise InputError(
            "real images with --data were wanted, or --synthetic for inputs that are made up; give one of the two",
            hint="such as --data digits, cifar10:PATH or folder:PATH",
        )
    with phases("bench") as told:
        from gmmvit_deploy.artifacts import open_bundle
        from gmmvit_deploy.bench.measure import Plan
        from gmmvit_deploy.bench.page import write_page
        from gmmvit_deploy.bench.run import BenchOptions, bench
        from gmmvit_deploy.pages import require_page
        from gmmvit_deploy.parity.inputs import open_images_of
        from gmmvit_deploy.precision import precision_from
        from gmmvit_deploy.runners.open import open_runners
        from gmmvit_deploy.writing import new_file, require_free_file

        if report is not None:
            require_page(report, force=force)
        if output is not None:
            require_free_file(output, force=force)
        options = BenchOptions(
            plan=Plan(batches=_batches(batch), rounds=rounds, seconds=seconds),
            data=open_images_of(data) if data else None,
            samples=samples,
            bound_ms=bound_ms,
            roofline=roofline,
            waterfall=waterfall,
        )
        opened = open_bundle(bundle)
        names = [name.strip() for name in runner.split(",")]
        settings: dict[str, Any] = {"urls": url, "model": model, "engine": engine}
        with open_runners(names, opened, precision=precision_from(precision), **settings) as runners:
            found = bench(opened, runners, options, told=told)
        result = found.to_json()
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
    if found.wrong:
        raise typer.Exit(1)


def _batches(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as exc:
        raise InputError(f"--batch is {text!r}; numbers with commas were wanted, such as 1,8,64") from exc


def _print(result: dict[str, Any]) -> None:
    from gmmvit_deploy.bench.words import percentile_words, roofline_words

    shares = {(one["runner"], one["batch"]): f"{one['share']:.0%}" for one in result["shares"]}
    over = {(one["runner"], one["scenario"], one["batch"]): one for one in result["ratios"]}
    rows = []
    for cell in result["cells"]:
        timed = cell["scenario"] != "Offline"
        found = over.get((cell["runner"], cell["scenario"], cell["batch"]))
        rows.append(
            (
                cell["runner"],
                cell["scenario"],
                str(cell["batch"]),
                f"{cell['median_ms']:.3f}" if timed else "",
                percentile_words(cell, "p90"),
                percentile_words(cell, "p99"),
                f"{cell['samples_per_second']:,.0f}",
                f"{found['median']:.2f} ({found['low']:.2f}–{found['high']:.2f})" if found else "",
                shares.get((cell["runner"], cell["batch"]), "") if timed else "",
                "right" if cell["outputs"]["right"] else "WRONG",
            )
        )
    over_name = result["cells"][0]["runner"]
    head = (
        "runner",
        "scenario",
        "batch",
        "median ms",
        "p90",
        "p99",
        "images/s",
        f"time over {over_name}",
        "roofline",
        "",
    )
    print_table(head, rows, title=str(result["bundle"]["path"]))
    for line in result["rooflines"]:
        typer.echo(f"roofline {roofline_words(line)}")
    for index, step in enumerate(result["waterfall"]):
        parts = ", ".join(f"{name} {ms:.3f}" for name, ms in step["parts"].items())
        more = f" ({step['over_before']:+.3f})" if index else ""
        typer.echo(f"one image: {step['name']}: {step['ms']:.3f} ms{more}{': ' + parts if parts else ''}")
    for load in result["loads"]:
        best = load["best"]
        says = f"{best['rate']:,.0f} a second, p99 {best['p99_ms']:.2f} ms" if best else "no rate that was tried holds"
        typer.echo(f"p99 below {load['bound_ms']:g} ms: {load['runner']}: {says}")
    for skipped in result["skipped"]:
        typer.echo(f"skipped: {skipped}")
    for reason in result["reasons"]:
        typer.echo(f"invalid: {reason}")
    typer.echo(result["verdict"])


def _compare(first: Path, second: Path, *, bundle: Path | None, as_json: bool) -> None:
    from gmmvit_deploy.bench.compare import compare, open_result

    if bundle is not None:
        raise InputError("--compare takes two results and no bundle")
    found = compare(open_result(first), open_result(second))
    if as_json:
        from dataclasses import asdict

        print_json({"rows": [asdict(row) for row in found.rows], "differing": found.differing})
        return
    _print_comparison(found)


def _print_comparison(found: Comparison) -> None:
    rows = [
        (
            row.runner,
            row.scenario,
            str(row.batch),
            f"{row.a_ms:.3f}",
            f"{row.b_ms:.3f}",
            f"{row.change:.3f} ({row.low:.3f}–{row.high:.3f})",
            ("slower" if row.change > 1 else "faster") if row.certain else "cannot be told apart",
        )
        for row in found.rows
    ]
    print_table(("runner", "scenario", "batch", "A ms", "B ms", "B over A", ""), rows)
    for name, (a, b) in found.differing.items():
        typer.echo(f"differs: {name}: {a} in A, {b} in B")
    typer.echo("A and B were not measured side by side: what the machine did in between is part of the change")
