from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import get_args

import typer

from gmmvit_cli.options import AS_JSON, FORCE, TRITONSERVER
from gmmvit_cli.output import print_json, print_table
from gmmvit_cli.panels import MODEL, listed, output_option
from gmmvit_cli.progress import progress
from gmmvit_deploy.models.specs import MaskKind

EXAMPLE = """gmmvit demo --output demo-output
gmmvit demo --output demo-output --model timm:test_vit --mask gmm"""

_MASKS = get_args(MaskKind)


def demo(
    model: str | None = MODEL.option(
        "NAME",
        "Train a classifier of timm, such as test_vit or timm:test_vit, in place of this project's GMM-ViT. "
        "Requires the extra timm. Large architectures train for hours on a CPU.",
    ),
    mask: MaskKind = MODEL.option(
        "KIND",
        f"Mask on the attention scores: {listed(_MASKS)}. plain is no mask, gmm a Gaussian mixture mask, elm a "
        "learned matrix, decay a bias that decreases with the distance of two patches, which needs --model.",
        default="gmm",
        names=_MASKS,
    ),
    out: Path = output_option("FOLDER", "Folder for all files of the demo.", default=Path("demo-output")),
    force: bool = FORCE,
    tritonserver: Path | None = TRITONSERVER,
    as_json: bool = AS_JSON,
) -> None:
    """The model is a GMM-ViT (a vision transformer with Gaussian mixture masks on the attention scores), trained on
    handwritten digits for about a minute on two cores. With --model, the model is a classifier of timm, which is saved
    and exported as a model folder of timm.
    """
    with progress("demo") as on_progress:
        from gmmvit_deploy.demo.run import run_demo

        result = run_demo(out, force=force, tritonserver=tritonserver, model=model, mask=mask, on_progress=on_progress)
    if as_json:
        print_json(asdict(result))
        return
    rows = [(step.name, step.result, f"{step.seconds:.1f} s") for step in result.steps]
    print_table(("step", "result", "time"), rows)
    print_table(
        ("runner", "top-1 accuracy on held-out digits"), [(who, f"{share:.2%}") for who, share in result.top1.items()]
    )
    typer.echo(
        f"All files are in {result.path}: {result.checkpoint.name}, bundle, parity.html, bench.html, model_repository, "
        "images, tritonserver.log"
    )
    typer.echo(f"Serve the model again:  gmmvit serve {result.path / 'model_repository'}")
    typer.echo(f"Classify with it:       gmmvit classify {result.path / 'images'} --url grpc://localhost:8001")
