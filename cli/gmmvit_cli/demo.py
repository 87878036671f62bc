from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer

from gmmvit_cli.options import FORCE, OUTPUT, TRITONSERVER, require_output
from gmmvit_cli.output import JSON_OPTION, note, print_json, print_table
from gmmvit_cli.progress import progress

EXAMPLE = "gmmvit demo --output demo-output"


def demo(
    out: Path = typer.Option(
        Path("demo-output"),
        "-o",
        "--output",
        metavar="FOLDER",
        rich_help_panel=OUTPUT,
        help="Folder for all files of the demo.",
    ),
    force: bool = FORCE,
    tritonserver: Path | None = TRITONSERVER,
    as_json: bool = JSON_OPTION,
) -> None:
    """The model is a GMM-ViT (a vision transformer with Gaussian mixture masks on the attention scores), trained on
    handwritten digits for about a minute on two cores.
    """
    require_output(out, force=force)
    note("demo: training takes about a minute on two cores")
    with progress("demo") as on_progress:
        from gmmvit_deploy.demo.run import run_demo

        result = run_demo(out, force=force, tritonserver=tritonserver, on_progress=on_progress)
    if as_json:
        print_json(asdict(result))
        return
    rows = [(step.name, step.result, f"{step.seconds:.1f} s") for step in result.steps]
    print_table(("step", "result", "time"), rows)
    print_table(
        ("runner", "top-1 accuracy on held-out digits"), [(who, f"{share:.2%}") for who, share in result.top1.items()]
    )
    typer.echo(
        f"All files are in {result.path}: checkpoint.pth, bundle, parity.html, bench.html, model_repository, "
        "images, tritonserver.log"
    )
    typer.echo(f"Serve the model again:  gmmvit serve {result.path / 'model_repository'}")
    typer.echo(f"Classify with it:       gmmvit classify {result.path / 'images'} --url grpc://localhost:8001")
