"""``gmmvit inspect BUNDLE --image FILE``: the attention of the bundle's model for an image."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gmmvit_cli.models import permit_class
from gmmvit_cli.options import INPUT, existing
from gmmvit_cli.output import note, print_json, print_table
from gmmvit_cli.progress import progress
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.progress import Progress

if TYPE_CHECKING:
    from gmmvit_deploy.reports.pictures.attention_of_image import ImageAttention

__all__ = ["IMAGE", "inspect_attention"]

IMAGE = typer.Option(
    None,
    "--image",
    metavar="FILE",
    rich_help_panel=INPUT,
    callback=existing("--image"),
    help="Draw the attention of the bundle's model for this image (JPEG, PNG, WebP or BMP).",
)


def inspect_attention(
    path: Path | None, image: Path, model: str | None, report: Path | None, *, force: bool, as_json: bool
) -> None:
    """Compute and print the attention of the bundle at ``path`` for an image, and write the report."""
    if path is None:
        raise InputError("--image draws the attention of a bundle", hint=f"type gmmvit inspect BUNDLE --image {image}")
    with progress("inspect") as on_progress:
        from gmmvit_deploy.bundle.artifacts import open_bundle

        on_progress(Progress("open the bundle"))
        bundle = open_bundle(path)
        permit_class(bundle, model)

        # Imports PyTorch: a bundle that is missing is refused without it.
        from gmmvit_deploy.reports.pictures.attention_of_image import attention_of_bundle
        from gmmvit_deploy.reports.pictures.attention_report import write_attention_report
        from gmmvit_deploy.reports.pictures.mask_report import require_report_suffix

        if report is not None:
            require_report_suffix(report)
        on_progress(Progress("compute the attention"))
        pixels, attention = attention_of_bundle(bundle, image)
        if report is not None:
            write_attention_report(pixels, attention, report, bundle=path.name, image=image.name, force=force)
    described = {"bundle": str(path), "sha256": bundle.sha256, "image": str(image), **attention.to_json()}
    if as_json:
        print_json(described if report is None else {**described, "report": str(report)})
        return
    _print_attention(attention)
    if report is not None:
        note(f"report: {report}")


def _print_attention(attention: ImageAttention) -> None:
    typer.echo(f"class: {attention.label}")
    rows = [
        (
            layer.layer,
            f"{layer.grid[0]}×{layer.grid[1]}",
            *("  ".join("–" if v is None else f"{v:.2f}" for v in values) for values in (layer.patches, layer.pixels)),
        )
        for layer in attention.distances
    ]
    if rows:
        columns = ("layer", "grid", "distance of each head, in steps of the grid", "in pixels")
        print_table(columns, rows, title="mean attention distance")
    for name, reason in attention.no_distances.items():
        typer.echo(f"no distance: {name}: {reason}")
    if attention.rollout is None:
        typer.echo(f"no rollout: {attention.no_rollout}")
        return
    shares = attention.rollout.values
    row, column = divmod(int(shares.argmax()), shares.shape[1])
    typer.echo(
        f"rollout: of {attention.rollout.reads}; largest share {shares.max():.2%}, of the patch in row {row + 1}, "
        f"column {column + 1}; prefix tokens {attention.rollout.prefix_share:.2%}"
    )
