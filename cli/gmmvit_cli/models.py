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
    help="Attention heads, of the first stage where there are several; for files that do not state them: plain, ELM, "
    "or a mask shared by all heads.",
)
PRESET = typer.Option(
    None,
    "--preset",
    metavar="NAME",
    rich_help_panel=MODEL,
    help=f"Name of a known model: {', '.join(PRESETS)}.",
    callback=read_by(family_of_preset),
    autocompletion=complete(lambda: tuple(PRESETS)),
)
MASK_FORM = typer.Option(
    "stored",
    "--mask-form",
    metavar="FORM",
    rich_help_panel=MODEL,
    help="stored: the mask raises the stored base to a power, as the released code does. "
    "closed: the model was trained with the paper's formula from distances.",
    callback=choice_from("--mask-form", lambda: _MASK_FORMS),
    autocompletion=complete(lambda: _MASK_FORMS),
)
IMAGE_SIZE = typer.Option(
    None,
    "--image-size",
    metavar="PIXELS",
    rich_help_panel=MODEL,
    help="Side of the images in pixels, for files whose tensors do not state it.",
)
CHANNELS = typer.Option(
    None,
    "--channels",
    metavar="N",
    rich_help_panel=MODEL,
    show_default="read from the tensors, else 3",
    help="Channels of the images: 1 grey, 2 grey and alpha, 3 RGB, 4 RGB and alpha.",
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
