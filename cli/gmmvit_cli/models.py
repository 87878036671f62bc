"""The options for facts that the tensors of a checkpoint do not show, for the commands that read checkpoints."""

from __future__ import annotations

import typer

from gmmvit_cli.choices import choice_from, complete, read_by
from gmmvit_cli.options import MODEL
from gmmvit_deploy.families import PRESETS, family_of_preset
from gmmvit_deploy.sources.hints import LoadHints

__all__ = ["CHANNELS", "HEADS", "IMAGE_SIZE", "MASK_FORM", "PRESET", "hints_from"]

_MASK_FORMS = ("stored", "closed")

HEADS = typer.Option(
    None,
    "--heads",
    metavar="N",
    rich_help_panel=MODEL,
    help="Number of attention heads; for a model with stages, of its first stage. Required where the tensors of the "
    "checkpoint do not show it and no --preset is given, for example in a ViT without masks.",
)
PRESET = typer.Option(
    None,
    "--preset",
    metavar="NAME",
    rich_help_panel=MODEL,
    help=f"Named configuration that supplies the number of heads: {', '.join(PRESETS)}. It must match the checkpoint.",
    callback=read_by(family_of_preset),
    autocompletion=complete(lambda: tuple(PRESETS)),
)
MASK_FORM = typer.Option(
    "stored",
    "--mask-form",
    metavar="FORM",
    rich_help_panel=MODEL,
    help="Form of Gaussian mixture masks in training. stored: powers of a base matrix that the checkpoint stores, as "
    "in the paper authors' code. closed: the paper's formula, computed from token distances. A wrong form gives wrong "
    "logits.",
    callback=choice_from("--mask-form", lambda: _MASK_FORMS),
    autocompletion=complete(lambda: _MASK_FORMS),
)
IMAGE_SIZE = typer.Option(
    None,
    "--image-size",
    metavar="PIXELS",
    rich_help_panel=MODEL,
    help="Width and height of the images, which are square. Required where the tensors of the checkpoint do not show "
    "it.",
)
CHANNELS = typer.Option(
    None,
    "--channels",
    metavar="N",
    rich_help_panel=MODEL,
    help="Channels of the images: 1 grey, 2 grey and alpha, 3 RGB, 4 RGB and alpha. Required where the tensors of the "
    "checkpoint do not show it.",
)


def hints_from(
    heads: int | None,
    preset: str | None,
    mask_form: str,
    *,
    image_size: int | None = None,
    channels: int | None = None,
) -> LoadHints:
    return LoadHints(
        heads=heads,
        preset=preset,
        closed_form=True if mask_form == "closed" else None,
        image_size=image_size,
        channels=channels,
    )
