"""The options for facts that the tensors of a checkpoint do not show, for the commands that read checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from gmmvit_cli.choices import choice_from, complete, listed, read_by
from gmmvit_cli.options import MODEL, existing
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.families import PRESETS, family_of_preset
from gmmvit_deploy.sources.hints import (
    SOURCES,
    TYPED_POOLS,
    WEIGHTS_KINDS,
    LoadHints,
    TypedPool,
    WeightsKind,
    own_class_of,
)
from gmmvit_deploy.specs import INTERPOLATIONS, Interpolation

if TYPE_CHECKING:
    from gmmvit_deploy.artifacts import Bundle

__all__ = [
    "ARCHITECTURE",
    "CHANNELS",
    "CLASS_OF_BUNDLE",
    "CLASS_TO_CONVERT",
    "DECOMPOSED_STAGES",
    "HEAD",
    "HEADS",
    "HEAD_AVERAGE",
    "HEAD_BLOCKS",
    "IMAGE_SIZE",
    "INTERPOLATION",
    "MASK_FORM",
    "MODEL_ARGS",
    "POOL",
    "PRESET",
    "RESIZE_TO",
    "SCALE_ADJUSTMENT",
    "SOURCE",
    "TRANSFORM_SCALE",
    "WEIGHTS",
    "hints_from",
    "model_args_from",
    "permit_class",
]

_MASK_FORMS = ("stored", "closed")


def stages_from(text: str | None) -> tuple[int, ...] | None:
    """Parse the text of --decomposed-stages.  Errors: InputError when the text is neither ``none`` nor numbers."""
    if text is None:
        return None
    if text == "none":
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as exc:
        raise InputError(
            f"--decomposed-stages: expected numbers separated by commas, or none, got {text!r}",
            hint="type for example --decomposed-stages 1,2,3",
        ) from exc


HEADS = typer.Option(
    None,
    "--heads",
    metavar="N",
    rich_help_panel=MODEL,
    help="Number of attention heads. For a model with several stages, type the number of heads in the first stage. "
    "Required if the tensors of the checkpoint do not show the number and no --preset is given, for example for a ViT "
    "without masks.",
)
PRESET = typer.Option(
    None,
    "--preset",
    metavar="NAME",
    rich_help_panel=MODEL,
    help=f"Named configuration: {', '.join(PRESETS)}. Supplies what the tensors of the checkpoint do not show: the "
    "number of heads; for a DeepViT, also the scale adjustment and the transform scale; for an RMT, the image size and "
    "the decomposed stages. The configuration must match the checkpoint.",
    callback=read_by(family_of_preset),
    autocompletion=complete(lambda: tuple(PRESETS)),
)
MASK_FORM = typer.Option(
    "stored",
    "--mask-form",
    metavar="FORM",
    rich_help_panel=MODEL,
    help="How the training code computed the Gaussian mixture masks. stored: as elementwise powers of a base matrix "
    "that the checkpoint stores. closed: with the formula of a Gaussian, from the distances between tokens. A wrong "
    "form gives wrong logits.",
    callback=choice_from("--mask-form", lambda: _MASK_FORMS),
    autocompletion=complete(lambda: _MASK_FORMS),
)
IMAGE_SIZE = typer.Option(
    None,
    "--image-size",
    metavar="PIXELS",
    rich_help_panel=MODEL,
    help="Width and height of the images, which are square. Required if the checkpoint does not show the size.",
)
RESIZE_TO = typer.Option(
    None,
    "--resize-to",
    metavar="PIXELS",
    rich_help_panel=MODEL,
    help="Build the model for square images of another width and height than in training; only for models that timm "
    "builds. Position embeddings and tables of relative position biases are resampled. The resized model is another "
    "network, so measure the accuracy of the resized model.",
)
INTERPOLATION = typer.Option(
    None,
    "--interpolation",
    metavar="CODE",
    rich_help_panel=MODEL,
    help=f"For --resize-to: resample the position embeddings with the algorithm of this code: {listed(INTERPOLATIONS)}."
    " Without this option: the code that wrote the checkpoint. Required if the checkpoint does not show the code.",
    callback=choice_from("--interpolation", lambda: INTERPOLATIONS),
    autocompletion=complete(lambda: INTERPOLATIONS),
)
CHANNELS = typer.Option(
    None,
    "--channels",
    metavar="N",
    rich_help_panel=MODEL,
    help="Channels of the images: 1 grey, 2 grey and alpha, 3 RGB, 4 RGB and alpha. Required if the tensors of the "
    "checkpoint do not show the channels.",
)
WEIGHTS = typer.Option(
    None,
    "--weights",
    metavar="KIND",
    rich_help_panel=MODEL,
    help="Weights to take from a checkpoint that holds trained and averaged weights. trained: the weights that the "
    "optimiser left. averaged: the moving average (EMA) of the trained weights. Required for such a checkpoint, "
    "because trained and averaged weights give different logits.",
    callback=choice_from("--weights", lambda: WEIGHTS_KINDS),
    autocompletion=complete(lambda: WEIGHTS_KINDS),
)
SOURCE = typer.Option(
    None,
    "--source",
    metavar="CODE",
    rich_help_panel=MODEL,
    help=f"Code that wrote the checkpoint: {listed(SOURCES)}. Required if the names of the tensors fit both, as for a "
    "CaiT without masks.",
    callback=choice_from("--source", lambda: SOURCES),
    autocompletion=complete(lambda: SOURCES),
)
POOL = typer.Option(
    None,
    "--pool",
    metavar="KIND",
    rich_help_panel=MODEL,
    help="What the classifier reads: cls, the class token; or mean, the mean of all tokens. Required if no tensor "
    "shows what the classifier reads: for DeepViT and small-data ViT of vit-pytorch, and for a ViT of vit-pytorch "
    "whose class token has the shape (1, 1, dim). For a backbone of Hugging Face transformers: its features, cls or "
    "pooler, its pooler_output.",
    callback=choice_from("--pool", lambda: TYPED_POOLS),
    autocompletion=complete(lambda: TYPED_POOLS),
)
SCALE_ADJUSTMENT = typer.Option(
    None,
    "--scale-adjustment",
    metavar="NUMBER",
    rich_help_panel=MODEL,
    help="For a DeepViT: the training code's scale_adjustment, 0.5 for deepvit_S and deepvit_L, 1 for the others.",
)
TRANSFORM_SCALE = typer.Option(
    None,
    "--transform-scale/--no-transform-scale",
    rich_help_panel=MODEL,
    help="For a DeepViT: whether the mixed attention weights are also divided by √(head dim), as in deepvit_S.",
)
DECOMPOSED_STAGES = typer.Option(
    None,
    "--decomposed-stages",
    metavar="LIST",
    rich_help_panel=MODEL,
    help="For an RMT: the stages, counted from 1, whose attention is decomposed into rows and columns, such as 1,2,3; "
    "or none. A wrong list raises no error, but the predictions are wrong.",
    callback=read_by(stages_from),
)

ARCHITECTURE = typer.Option(
    None,
    "--model",
    metavar="NAME",
    rich_help_panel=MODEL,
    help="Architecture of a model that timm builds, such as vit_tiny_patch16_224; or torchvision:VisionTransformer; or "
    "FILE.py:CLASS, a class in a Python file of yours. With FILE.py:CLASS, gmmvit runs the file. Required for a class "
    "of yours, and for a model of timm if the checkpoint names no architecture.",
)
MODEL_ARGS = typer.Option(
    None,
    "--model-args",
    metavar="JSON",
    rich_help_panel=MODEL,
    help="Arguments with which the training code built the model, as a JSON object such as "
    '{"patch_size": 4, "num_heads": 3}. These arguments replace the arguments of the same name in the checkpoint.',
)
HEAD = typer.Option(
    None,
    "--head",
    metavar="FILE",
    rich_help_panel=MODEL,
    callback=existing("--head"),
    help="Checkpoint of a linear classifier, for a DINO or DINOv2 backbone without classifier.",
)
HEAD_BLOCKS = typer.Option(
    None,
    "--head-blocks",
    metavar="N",
    rich_help_panel=MODEL,
    help="Number of last blocks whose class tokens the classifier of --head reads.",
)
HEAD_AVERAGE = typer.Option(
    False,
    "--head-average",
    rich_help_panel=MODEL,
    help="The classifier of --head also reads the mean of the patches.",
)


def _require_class(text: str) -> None:
    if own_class_of(text) is None:
        raise InputError(
            f"--model: expected FILE.py:CLASS, got {text!r}",
            hint=f"if {text!r} is the name of the model on the server, type --served-name {text}",
        )


CLASS_OF_BUNDLE = typer.Option(
    None,
    "--model",
    metavar="FILE.py:CLASS",
    rich_help_panel=MODEL,
    help="Class that the bundle was exported with, in a Python file of yours; the file must be unchanged. gmmvit runs "
    "this file to compute PyTorch's logits.",
    callback=read_by(_require_class),
)

CLASS_TO_CONVERT = typer.Option(
    None,
    "--model",
    metavar="FILE.py:CLASS",
    rich_help_panel=MODEL,
    help="Class that the bundle was exported with, in a Python file of yours; the file must be unchanged. gmmvit runs "
    "this file. Required if the bundle was exported with FILE.py:CLASS.",
)


def permit_class(bundle: Bundle, model: str | None) -> None:
    """Allow this process to run the file of the bundle's class, if ``--model`` names the file.

    Errors: InputError when the file, the class or the bundle do not fit.
    """
    if model is not None:
        from gmmvit_deploy.checkpoints.own_class import permit_class_of

        permit_class_of(bundle.manifest.spec, model, what=str(bundle.path))


def model_args_from(text: str | None) -> dict[str, Any]:
    """Parse the text of --model-args.  Errors: InputError when the text is no JSON object."""
    if text is None:
        return {}
    try:
        values = json.loads(text)
    except ValueError as exc:
        raise InputError(
            f"--model-args: expected JSON, got {text!r}: {exc}",
            hint="""type for example '{"num_heads": 3}' in quotes""",
        ) from exc
    if not isinstance(values, dict):
        raise InputError(
            f"--model-args: expected a JSON object, got {text!r}",
            hint="""type for example '{"num_heads": 3}' in quotes""",
        )
    return values


def hints_from(
    heads: int | None,
    preset: str | None,
    mask_form: str,
    *,
    image_size: int | None = None,
    resize_to: int | None = None,
    interpolation: str | None = None,
    channels: int | None = None,
    weights: str | None = None,
    model: str | None = None,
    model_args: str | None = None,
    head: Path | None = None,
    head_blocks: int | None = None,
    head_average: bool = False,
    source: str | None = None,
    pool: str | None = None,
    scale_adjustment: float | None = None,
    transform_scale: bool | None = None,
    decomposed_stages: str | None = None,
    only_features: bool = False,
) -> LoadHints:
    """Return the hints of the options.  Errors: InputError when the value of an option is invalid."""
    return LoadHints(
        heads=heads,
        preset=preset,
        closed_form=True if mask_form == "closed" else None,
        image_size=image_size,
        resize_to=resize_to,
        interpolation=cast("Interpolation | None", interpolation),  # LoadHints checks it
        channels=channels,
        weights=cast("WeightsKind | None", weights),  # LoadHints checks it
        model=model,
        model_args=model_args_from(model_args),
        head=None if head is None else str(head),
        head_blocks=head_blocks,
        head_average=head_average,
        source=source,
        pool=cast("TypedPool | None", pool),  # LoadHints checks it
        scale_adjustment=scale_adjustment,
        transform_scale=transform_scale,
        decomposed_stages=stages_from(decomposed_stages),
        only_features=only_features,
    )
