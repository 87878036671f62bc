from __future__ import annotations

from pathlib import Path

import typer

from gmmvit_cli.output import JSON_OPTION, print_json, print_table, working


def parity(
    bundle: Path = typer.Argument(help="A bundle that gmmvit export wrote."),
    runner: str = typer.Option(
        "onnxruntime", help="eager, onnxruntime, tensorrt, tensorrt-rtx, triton-grpc or triton-http."
    ),
    precision: str = typer.Option("fp32", help="Of the graph that onnxruntime runs: fp32, fp16, int8."),
    engine: Path | None = typer.Option(None, help="An engine that gmmvit build wrote, for the two TensorRTs."),
    url: str | None = typer.Option(None, help="A Triton server: grpc://host:port or http://host:port."),
    model: str = typer.Option("gmmvit", help="Name that the repository gave the model on the server."),
    as_json: bool = JSON_OPTION,
) -> None:
    """Hold a runner to the bundle's golden logits and to eager PyTorch; exit with 1 if it differs."""
    with working("comparing") as says:
        from gmmvit_deploy.artifacts import open_bundle
        from gmmvit_deploy.parity.check import check_parity, open_runner
        from gmmvit_deploy.precision import precision_from

        opened = open_bundle(bundle)
        of = precision_from(precision)
        with open_runner(runner, opened, url=url, model=model, engine=engine, precision=of) as running:
            result = check_parity(opened, running, on_done=says)
    if as_json:
        print_json(result.to_json())
    else:
        rows = [
            (
                c.reference,
                str(c.batch),
                f"{c.largest_abs:.2e}",
                f"{c.largest_rel:.2e}",
                f"{c.limit:.2e}",
                f"{c.agreement:.1%}",
                "ok" if c.passed else "DIFFERS",
            )
            for c in result.comparisons
        ]
        columns = ("against", "batch", "largest abs", "largest rel", "limit", "same argmax", "")
        print_table(columns, rows, title=f"{result.runner} on {bundle}")
        typer.echo("passed" if result.passed else "FAILED")
    if not result.passed:
        raise typer.Exit(1)
