from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

import typer

from gmmvit_cli.choices import choice_from, complete, listed, read_by
from gmmvit_cli.models import model_args_from
from gmmvit_cli.options import DATA, FORCE, INPUT, MODEL, OUTPUT, normalisation_from, require_output
from gmmvit_cli.output import JSON_OPTION, print_json, print_table
from gmmvit_cli.progress import progress
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.images.data.files import KINDS
from gmmvit_deploy.images.resize_rules import RESIZE_RULES, resize_rule_from
from gmmvit_deploy.models.families import PRESETS, family_of_preset
from gmmvit_deploy.models.specs import MaskKind, mask_kind_named
from gmmvit_deploy.training.recipe import POLICIES, RECIPES, REPETITIONS, recipe_from

if TYPE_CHECKING:
    from gmmvit_deploy.training.processes import Device

EXAMPLE = """gmmvit train -o trained --data cifar10:PATH --preset vit --mask gmm
gmmvit train -o trained --data digits --model test_vit --recipe light"""

_MASKS = tuple(kind for kind in get_args(MaskKind) if kind != "plain")
_DEVICES = ("auto", "cpu", "cuda")
_SINGLE_LABEL = tuple(kind for kind in KINDS[:-1] if kind != "table")  # a table has several labels for an image
_RECIPE = "Recipe"


def train(
    data: str = typer.Option(
        ...,
        "--data",
        metavar="KIND:PATH",
        rich_help_panel=INPUT,
        help=f"Images to train on, each with a single class: KIND:PATH, or only the word {KINDS[-1]} for "
        f"scikit-learn's handwritten digits. KIND is {listed(_SINGLE_LABEL)}. Without #test, the split train. "
        "The accuracy is measured on the split test, if the data has one.",
        autocompletion=DATA.autocompletion,
    ),
    test: str | None = typer.Option(
        None,
        "--test",
        metavar="KIND:PATH",
        rich_help_panel=INPUT,
        help="Images for the accuracy after each epoch, as for gmmvit parity --data.",
        autocompletion=DATA.autocompletion,
    ),
    image_size: int | None = typer.Option(
        None,
        "--image-size",
        metavar="PIXELS",
        rich_help_panel=INPUT,
        help="Width and height to which images are resized. Required for folder and array; otherwise 64 for "
        "tiny-imagenet and 32 for the others.",
    ),
    channels: int = typer.Option(
        3,
        "--channels",
        metavar="N",
        rich_help_panel=INPUT,
        help="Channels of the images: 1 grey, 3 RGB, 2 or 4 with alpha.",
    ),
    mean: str | None = typer.Option(
        None,
        metavar="NUMBERS",
        rich_help_panel=INPUT,
        help="Mean of each channel, with pixels scaled to 0..1. Without --mean and --std: those of the data set, or "
        "measured on the training images.",
    ),
    std: str | None = typer.Option(
        None, metavar="NUMBERS", rich_help_panel=INPUT, help="Standard deviation of each channel, as --mean."
    ),
    resize: str = typer.Option(
        "stretch-bilinear",
        metavar="METHOD",
        rich_help_panel=INPUT,
        help=f"How images get the size of the network, in training and on a server: {listed(RESIZE_RULES)}.",
        callback=read_by(resize_rule_from),
        autocompletion=complete(lambda: RESIZE_RULES),
    ),
    crop_pct: float = typer.Option(
        1.0, "--crop-pct", metavar="NUMBER", rich_help_panel=INPUT, help="timm's crop_pct, as for gmmvit export."
    ),
    preset: str | None = typer.Option(
        None,
        "--preset",
        metavar="NAME",
        rich_help_panel=MODEL,
        help=f"Train a network of this package: {', '.join(PRESETS)}.",
        callback=read_by(family_of_preset),
        autocompletion=complete(lambda: tuple(PRESETS)),
    ),
    model: str | None = typer.Option(
        None, "--model", metavar="NAME", rich_help_panel=MODEL, help="Train an architecture of timm, such as test_vit."
    ),
    model_args: str | None = typer.Option(
        None,
        "--model-args",
        metavar="JSON",
        rich_help_panel=MODEL,
        help='Arguments of timm for --model, such as {"patch_size": 4}.',
        callback=read_by(model_args_from),
    ),
    mask: str | None = typer.Option(
        None,
        "--mask",
        metavar="KIND",
        rich_help_panel=MODEL,
        help=f"Mask on the attention scores: {listed(_MASKS)}. gmm is a Gaussian mixture mask, elm a learned matrix, "
        "decay a bias that decreases with the distance of two patches. Without --mask: no mask; for an RMT, decay.",
        callback=choice_from("--mask", lambda: _MASKS),
        autocompletion=complete(lambda: _MASKS),
    ),
    recipe: str = typer.Option(
        "paper",
        "--recipe",
        metavar="NAME",
        rich_help_panel=_RECIPE,
        help=f"Values of the options below that are not typed: {listed(tuple(RECIPES))}. paper: the released code's "
        "defaults, for data sets like CIFAR. light: random crops and label smoothing only, for small data sets.",
        callback=choice_from("--recipe", lambda: tuple(RECIPES)),
        autocompletion=complete(lambda: tuple(RECIPES)),
    ),
    epochs: int | None = typer.Option(None, "--epochs", metavar="N", rich_help_panel=_RECIPE, help="Number of epochs."),
    batch: int | None = typer.Option(
        None, "--batch", metavar="N", rich_help_panel=_RECIPE, help="Images of a step, over all processes."
    ),
    seed: int = typer.Option(
        0, "--seed", metavar="N", rich_help_panel=_RECIPE, help="Where all random numbers of the run start."
    ),
    rate: float | None = typer.Option(
        None, "--rate", metavar="NUMBER", rich_help_panel=_RECIPE, help="Learning rate after the warm-up."
    ),
    weight_decay: float | None = typer.Option(
        None, "--weight-decay", metavar="NUMBER", rich_help_panel=_RECIPE, help="Weight decay of AdamW."
    ),
    mask_decay: bool | None = typer.Option(
        None,
        "--mask-decay/--no-mask-decay",
        rich_help_panel=_RECIPE,
        help="Whether the parameters of the masks also decay, as in the released code.",
    ),
    repeat: str | None = typer.Option(
        None,
        "--repeat",
        metavar="KIND",
        rich_help_panel=_RECIPE,
        help="What an epoch is. passes: three passes over the images, which the released code takes for repeated "
        "augmentation. batches: repeated augmentation, an image three times in a batch. none: a single pass.",
        callback=choice_from("--repeat", lambda: REPETITIONS),
        autocompletion=complete(lambda: REPETITIONS),
    ),
    drop_path: float | None = typer.Option(
        None, "--drop-path", metavar="NUMBER", rich_help_panel=_RECIPE, help="Stochastic depth of the last block."
    ),
    auto_augment: str | None = typer.Option(
        None,
        "--auto-augment",
        metavar="POLICY",
        rich_help_panel=_RECIPE,
        help=f"Policy of AutoAugment: {listed(POLICIES)}. The recipe paper takes the policy of the data set, svhn for "
        "digits, and imagenet for all others.",
        callback=choice_from("--auto-augment", lambda: POLICIES),
        autocompletion=complete(lambda: POLICIES),
    ),
    padding: int | None = typer.Option(
        None,
        "--padding",
        metavar="PIXELS",
        rich_help_panel=_RECIPE,
        help="Pixels around an image before a random crop of the image's size.",
    ),
    flip: bool | None = typer.Option(
        None,
        "--flip/--no-flip",
        rich_help_panel=_RECIPE,
        help="Whether half of the images are mirrored. The recipe paper mirrors no digits.",
    ),
    ema: float | None = typer.Option(
        None,
        "--ema",
        metavar="DECAY",
        rich_help_panel=_RECIPE,
        help="Average the weights with this decay, such as 0.9998; gmmvit export then takes the average.",
    ),
    device: str = typer.Option(
        "auto",
        "--device",
        metavar="NAME",
        rich_help_panel=OUTPUT,
        help=f"Where the network runs: {listed(_DEVICES)}. auto: a GPU if PyTorch has one.",
        callback=choice_from("--device", lambda: _DEVICES),
        autocompletion=complete(lambda: _DEVICES),
    ),
    workers: int = typer.Option(
        0, "--workers", metavar="N", rich_help_panel=OUTPUT, help="Processes that decode and augment images."
    ),
    out: Path = typer.Option(
        ..., "-o", "--output", metavar="FOLDER", rich_help_panel=OUTPUT, help="Folder of the run."
    ),
    save_steps: int = typer.Option(
        0,
        "--save-steps",
        metavar="N",
        rich_help_panel=OUTPUT,
        help="Write a checkpoint after every N steps, too; 0 is only after every epoch.",
    ),
    resume: bool = typer.Option(
        False,
        "--resume",
        rich_help_panel=OUTPUT,
        help="Continue the run in FOLDER from its last checkpoint. Type the other options as for that run.",
    ),
    force: bool = FORCE,
    as_json: bool = JSON_OPTION,
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
    if not resume:
        require_output(out, force=force, instead="add --resume to continue a run")
    _require_data(data, test)
    normalisation = normalisation_from(None, mean, std)
    chosen = recipe_from(
        recipe,
        data.partition("#")[0].partition(":")[0],
        epochs=epochs,
        batch=batch,
        rate=rate,
        weight_decay=weight_decay,
        decays_masks=mask_decay,
        repetition=repeat,
        drop_path=drop_path,
        policy=auto_augment,
        padding=padding,
        flip=flip,
        ema=ema,
    )
    with progress("train") as on_progress:
        from gmmvit_deploy.training.run import TrainOptions
        from gmmvit_deploy.training.run import train as run

        options = TrainOptions(
            data=data,
            test=test,
            preset=preset,
            model=model,
            model_args=model_args_from(model_args),
            mask=mask_kind_named(mask or "plain"),
            image_size=image_size,
            channels=channels,
            mean=normalisation.mean,
            std=normalisation.std,
            resize=resize_rule_from(resize),
            crop_pct=crop_pct,
            recipe=chosen,
            seed=seed,
            device=cast("Device", device),  # checked by the callback
            workers=workers,
            save_steps=save_steps,
        )
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


def _require_data(*texts: str | None) -> None:
    """Refuse data that cannot be opened, before any work.  Errors: InputError."""
    from gmmvit_deploy.images.data.open import require_data

    for text in texts:
        if text is not None:
            require_data(text)
