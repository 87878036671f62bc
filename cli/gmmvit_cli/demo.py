from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer

from gmmvit_cli.options import FORCE
from gmmvit_cli.output import JSON_OPTION, note, print_json, print_table, progress


def demo(
    out: Path = typer.Option(Path("demo-output"), "-o", "--output", help="Folder for everything the demo makes."),
    force: bool = FORCE,
    tritonserver: Path | None = typer.Option(None, help="The Triton server to use."),
    as_json: bool = JSON_OPTION,
) -> None:
    """Train a small GMM-ViT on handwritten digits, then take it through every step to a real Triton server."""
    note("training takes about a minute on two cores")
    from gmmvit_deploy.demo.run import EPOCHS, run_demo

    with progress("training", total=EPOCHS) as advance:
        result = run_demo(
            out,
            force=force,
            tritonserver=tritonserver,
            on_step=lambda name: note(f"· {name}"),
            on_epoch=lambda epoch, epochs, loss: advance(1),
        )
    if as_json:
        print_json(asdict(result))
        return
    rows = [(step.name, step.result, f"{step.seconds:.1f} s") for step in result.steps]
    print_table(("step", "what happened", "took"), rows)
    print_table(("top-1 on held-out digits", ""), [(who, f"{share:.2%}") for who, share in result.top1.items()])
    typer.echo(
        f"Everything is in {result.path}: checkpoint.pth, bundle, parity.html, bench.html, model_repository, "
        "images, tritonserver.log"
    )
    typer.echo(f"Serve it again:  gmmvit serve {result.path / 'model_repository'}")
    typer.echo(f"and ask it:      gmmvit classify {result.path / 'images'} --url grpc://localhost:8001")
