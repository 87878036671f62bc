"""The options for facts that the tensors of a checkpoint do not show, for the commands that read checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gmmvit_cli.panels import MODEL
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.models.families import FAMILIES, PRESETS
from gmmvit_deploy.models.sources.hints import SETTINGS, LoadHints, settings_from

if TYPE_CHECKING:
    from gmmvit_deploy.bundle.artifacts import Bundle

CLASS_RUNS = (
    "Class that the bundle was exported with, in a Python file of yours; the file must be unchanged. gmmvit runs "
)


def _settings_in_words() -> str:
    return "\n".join(f"{name}={setting.example}\n  {setting.meaning}" for name, setting in SETTINGS.items())


def presets_in_words() -> str:
    return "\n".join(f"{family.name}: {', '.join(family.presets)}" for family in FAMILIES if family.presets)


def _complete_settings(incomplete: str) -> list[str]:
    name, is_whole, value = incomplete.partition("=")
    if not is_whole:
        return [f"{each}=" for each in SETTINGS if each.startswith(name)]
    names = SETTINGS[name].names if name in SETTINGS else ()
    return [f"{name}={each}" for each in names if each.startswith(value)]


def model_args_from(text: str) -> dict[str, Any]:
    """Parse the text of --model-args.  Errors: InputError when the text is no JSON object."""
    hint = """type for example --model-args '{"num_heads": 3}', in quotes"""
    try:
        values = json.loads(text)
    except ValueError as exc:
        raise InputError(f"--model-args: expected JSON, got {text!r}: {exc}", hint=hint) from exc
    if not isinstance(values, dict):
        raise InputError(f"--model-args: expected a JSON object, got {text!r}", hint=hint)
    return values


CLASS_TO_CONVERT = MODEL.option(
    "FILE.py:CLASS",
    f"{CLASS_RUNS}this file. Required if the bundle was exported with FILE.py:CLASS.",
)


def options_of_checkpoints(
    preset: str | None = MODEL.option(
        "NAME",
        "Named configuration of training, such as vit; '--preset help' lists all. Supplies what the tensors of the "
        "checkpoint do not show: the number of heads; for a DeepViT, also the scale adjustment and the transform "
        "scale; for an RMT, the image size and the decomposed stages.",
        names=tuple(PRESETS),
        listing=presets_in_words,
    ),
    image_size: int | None = MODEL.option(
        "PIXELS",
        "Width and height of the images, which are square. Required if the checkpoint does not show the size.",
    ),
    resize_to: int | None = MODEL.option(
        "PIXELS",
        "Build the model for square images of another width and height than in training; only for models that timm "
        "builds. Position embeddings and tables of relative position biases are resampled. The resized model is "
        "another network, so measure the accuracy of the resized model.",
    ),
    model: str | None = MODEL.option(
        "NAME",
        "Architecture of a model that timm builds, such as vit_tiny_patch16_224; or torchvision:VisionTransformer; or "
        "FILE.py:CLASS, a class in a Python file of yours. With FILE.py:CLASS, gmmvit runs the file. Required for a "
        "class of yours, and for a model of timm if the checkpoint names no architecture.",
    ),
    model_args: Mapping[str, Any] | None = MODEL.option(
        "JSON",
        "Arguments with which the training code built the model, as a JSON object such as "
        '{"patch_size": 4, "num_heads": 3}. These arguments replace the arguments of the same name in the checkpoint.',
        parser=model_args_from,
    ),
    head: str | None = MODEL.option(
        "FILE",
        "Linear classifier for a backbone without one: the state dict of a torch.nn.Linear, an .npz file with coef_ "
        "and intercept_ of scikit-learn, or the file of the linear evaluation of DINO, DINOv2 or DINOv3.",
        must_exist=True,
    ),
    settings: list[str] | None = MODEL.option(
        "NAME=VALUE",
        "A fact that the tensors of the checkpoint do not show, such as heads=3 or channels=1; may be repeated. "
        "'--set help' lists the names.",
        name="--set",
        listing=_settings_in_words,
        autocompletion=_complete_settings,
        show_default=False,
    ),
) -> None:
    """Declare what `hints_from` reads."""


def hints_from(given: Mapping[str, Any], **more: Any) -> LoadHints:
    """Return what the parameters of a command state about a checkpoint.  more: fields of `LoadHints`."""
    return LoadHints(
        **{name: given[name] for name in ("preset", "image_size", "resize_to", "model", "head")},
        model_args=given["model_args"] or {},
        **settings_from(given["settings"] or ()),
        **more,
    )


def permit_class(bundle: Bundle, model: str | None) -> None:
    """Allow this process to run the file of the bundle's class, if ``--model`` names it.  Errors: InputError."""
    if model is not None:
        from gmmvit_deploy.checkpoints.own_class import permit_class_of

        permit_class_of(bundle.manifest.spec, model, what=str(bundle.path))
