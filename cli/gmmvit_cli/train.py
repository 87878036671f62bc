from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, get_args

import typer

from gmmvit_cli.models import model_args_from, presets_in_words
from gmmvit_cli.options import AS_JSON, FORCE, complete_data, normalisation_from, of_fields
from gmmvit_cli.output import print_json, print_table
from gmmvit_cli.panels import INPUT, MODEL, OUTPUT, Panel, listed, output_option
from gmmvit_cli.progress import progress
from gmmvit_deploy.arguments import Refusals
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.images.data.files import KINDS
from gmmvit_deploy.images.resize_rules import RESIZE_RULES, ResizeRule
from gmmvit_deploy.models.families import PRESETS
from gmmvit_deploy.models.specs import MaskKind
from gmmvit_deploy.training.recipe import POLICIES, RECIPES, REPETITIONS, Policy, Recipe, Repetition, recipe_from

EXAMPLE = """gmmvit train -o trained --data cifar10:PATH --preset vit --mask gmm
gmmvit train -o trained --data digits --model test_vit --recipe light"""

_MASKS = tuple(kind for kind in get_args(MaskKind) if kind != "plain")
_Device = Literal["auto", "cpu", "cuda"]
_SINGLE_LABEL = tuple(kind for kind in KINDS[:-1] if kind != "table")  # a table has several labels for an image
_RECIPE = Panel("Recipe")


def train(
    context: typer.Context,
    data: str = INPUT.option(
        "KIND:PATH",
        f"Images to train on, each with a single class: KIND:PATH, or only the word {KINDS[-1]} for "
        f"scikit-learn's handwritten digits. KIND is {listed(_SINGLE_LABEL)}. Without #test, the split train. "
        "The accuracy is measured on the split test, if the data has one.",
        default=...,
        autocompletion=complete_data,
    ),
    test: str | None = INPUT.option(
        "KIND:PATH",
        "Images for the accuracy after each epoch, as for gmmvit parity --data.",
        autocompletion=complete_data,
    ),
    image_size: int | None = INPUT.option(
        "PIXELS",
        "Width and height to which images are resized. Required for folder and array; otherwise 64 for "
        "tiny-imagenet and 32 for the others.",
    ),
    channels: int = INPUT.option("N", "Channels of the images: 1 grey, 3 RGB, 2 or 4 with alpha.", default=3),
    mean: str | None = INPUT.option(
        "NUMBERS",
        "Mean of each channel, with pixels scaled to 0..1. Without --mean and --std: those of the data set, or "
        "measured on the training images.",
    ),
    std: str | None = INPUT.option("NUMBERS", "Standard deviation of each channel, as --mean."),
    resize: ResizeRule = INPUT.option(
        "METHOD",
        f"How images get the size of the network, in training and on a server: {listed(RESIZE_RULES)}.",
        default="stretch-bilinear",
        names=RESIZE_RULES,
    ),
    crop_pct: float = INPUT.option("NUMBER", "timm's crop_pct, as for gmmvit export.", default=1.0),
    preset: str | None = MODEL.option(
        "NAME",
        "Train a network of this package, such as vit; '--preset help' lists all.",
        names=tuple(PRESETS),
        listing=presets_in_words,
    ),
    model: str | None = MODEL.option("NAME", "Train an architecture of timm, such as test_vit."),
    model_args: Mapping[str, Any] | None = MODEL.option(
        "JSON", 'Arguments of timm for --model, such as {"patch_size": 4}.', parser=model_args_from
    ),
    mask: MaskKind | None = MODEL.option(
        "KIND",
        f"Mask on the attention scores: {listed(_MASKS)}. gmm is a Gaussian mixture mask, elm a learned matrix, "
        "decay a bias that decreases with the distance of two patches. Without --mask: no mask; for an RMT, decay.",
        names=_MASKS,
    ),
    recipe: str = _RECIPE.option(
        "NAME",
        f"Values of the options below that are not typed: {listed(tuple(RECIPES))}. paper: the released code's "
        "defaults, for data sets like CIFAR. light: random crops and label smoothing only, for small data sets.",
        default="paper",
        names=tuple(RECIPES),
    ),
    epochs: int | None = _RECIPE.option("N", "Number of epochs."),
    batch: int | None = _RECIPE.option("N", "Images of a step, over all processes."),
    seed: int = _RECIPE.option("N", "Where all random numbers of the run start.", default=0),
    rate: float | None = _RECIPE.option("NUMBER", "Learning rate after the warm-up."),
    weight_decay: float | None = _RECIPE.option("NUMBER", "Weight decay of AdamW."),
    decays_masks: bool | None = _RECIPE.flag(
        "--mask-decay/--no-mask-decay",
        "Whether the parameters of the masks also decay, as in the released code.",
        default=None,
    ),
    repetition: Repetition | None = _RECIPE.option(
        "KIND",
        "What an epoch is. passes: three passes over the images, which the released code takes for repeated "
        "augmentation. batches: repeated augmentation, an image three times in a batch. none: a single pass.",
        name="--repeat",
        names=REPETITIONS,
    ),
    drop_path: float | None = _RECIPE.option("NUMBER", "Stochastic depth of the last block."),
    policy: Policy | None = _RECIPE.option(
        "POLICY",
        f"Policy of AutoAugment: {listed(POLICIES)}. The recipe paper takes the policy of the data set, svhn for "
        "digits, and imagenet for all others.",
        name="--auto-augment",
        names=POLICIES,
    ),
    padding: int | None = _RECIPE.option("PIXELS", "Pixels around an image before a random crop of the image's size."),
    flip: bool | None = _RECIPE.flag(
        "--flip/--no-flip", "Whether half of the images are mirrored. The recipe paper mirrors no digits.", default=None
    ),
    ema: float | None = _RECIPE.option(
        "DECAY", "Average the weights with this decay, such as 0.9998; gmmvit export then takes the average."
    ),
    device: _Device = OUTPUT.option(
        "NAME",
        "Where the network runs: auto, cpu or cuda. auto: a GPU if PyTorch has one.",
        default="auto",
        names=get_args(_Device),
    ),
    workers: int = OUTPUT.option("N", "Processes that decode and augment images.", default=0),
    out: Path = output_option("FOLDER", "Folder of the run."),
    save_steps: int = OUTPUT.option(
        "N", "Write a checkpoint after every N steps, too; 0 is only after every epoch.", default=0
    ),
    resume: bool = OUTPUT.flag(
        "--resume", "Continue the run in FOLDER from its last checkpoint. Type the other options as for that run."
    ),
    force: bool = FORCE,
    as_json: bool = AS_JSON,
) -> None:
    """The folder gets checkpoint.pth, which gmmvit export reads without options; log.jsonl, with the loss, the learning
    rate and the accuracy; and the event files of TensorBoard. Requires the extra train. A killed run goes on with
    --resume, and its log equals that of a run that was not killed. To use several GPUs, start the command with
    torchrun.
    """
    if resume and force:
        raise InputError(
            "--resume continues the run in the folder, and --force replaces the folder", hint="type one of them"
        )
    from gmmvit_deploy.images.data.open import require_data

    refusals = Refusals()
    for text in filter(None, (data, test)):
        with refusals.collected():
            require_data(text)
    with refusals.collected():
        normalisation = normalisation_from(None, mean, std)
    refusals.raise_all()
    chosen = recipe_from(
        recipe,
        data.partition("#")[0].partition(":")[0],
        **of_fields(Recipe, context.params),
    )
    with progress("train") as on_progress:
        from gmmvit_deploy.training.run import TrainOptions
        from gmmvit_deploy.training.run import train as run

        read = {
            "model_args": model_args or {},
            "mask": mask or "plain",
            "mean": normalisation.mean,
            "std": normalisation.std,
            "recipe": chosen,
        }
        options = TrainOptions(**{**of_fields(TrainOptions, context.params), **read})
        result = run(out, options, resume=resume, force=force, on_progress=on_progress)
    if result is None:  # torchrun started this process beside the first
        return
    if as_json:
        print_json(asdict(result))
        return
    accuracy = "not measured: no test images" if result.accuracy is None else f"{result.accuracy:.2%}"
    print_table(
        ("", ""),
        [
            ("trained", f"{result.epochs} epochs, {result.steps} steps"),
            ("loss", f"{result.loss:.4f} in the last epoch"),
            ("accuracy", f"{accuracy} of {result.test_images} test images" if result.test_images else accuracy),
        ],
    )
    typer.echo(result.checkpoint)
