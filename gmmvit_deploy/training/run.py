"""`train`: a training run that writes a folder, and that continues after it was killed."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.extras import require
from gmmvit_deploy.files.writing import new_folder, require_free
from gmmvit_deploy.images.data.images import Images
from gmmvit_deploy.images.data.open import held_out_of, kind_of_data, open_data
from gmmvit_deploy.images.datasets import DATASETS
from gmmvit_deploy.images.resize_rules import ResizeRule
from gmmvit_deploy.images.spec import ImageSpec
from gmmvit_deploy.models.specs import MaskKind, ModelSpec, spec_to_json
from gmmvit_deploy.progress import OnProgress, Progress, ignore
from gmmvit_deploy.training._batches import seed_everything
from gmmvit_deploy.training._files import CHECKPOINT, LOG, Log, load, save
from gmmvit_deploy.training.images import TrainingData, labels_of, mean_and_std
from gmmvit_deploy.training.networks import network_for_training, spec_of_preset, spec_of_timm
from gmmvit_deploy.training.processes import Device, Processes, processes
from gmmvit_deploy.training.recipe import SIDES, Recipe
from gmmvit_deploy.training.trainer import Epoch, Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """What to train on what.

    data: the images, ``kind:path`` or ``kind:path#split``; the default split is train.
    test: the images for the accuracy; None for the split test of ``data``, if it has this split.
    preset, model: a preset of a family, or an architecture of timm with the arguments ``model_args``.
    image_size: None for the size of the data set's images.
    mean, std: the normalisation; None for the data set's, or measured on the training images.
    workers: how many processes prepare images.
    save_steps: write a checkpoint after every so many steps, too; 0 for only after every epoch.
    Errors: InputError when not exactly one of ``preset`` and ``model`` is given, or a number is out of range.
    """

    data: str
    recipe: Recipe
    test: str | None = None
    preset: str | None = None
    model: str | None = None
    model_args: Mapping[str, Any] = field(default_factory=dict)
    mask: MaskKind = "plain"
    image_size: int | None = None
    channels: int = 3
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    resize: ResizeRule = "stretch-bilinear"
    crop_pct: float = 1.0
    seed: int = 0
    device: Device = "auto"
    workers: int = 0
    save_steps: int = 0

    def __post_init__(self) -> None:
        if (self.preset is None) == (self.model is None):
            raise InputError(
                "expected --preset or --model, " + ("got neither" if self.preset is None else "got both"),
                hint="type --preset NAME for a network of this package, or --model NAME for an architecture of timm",
            )
        if self.model_args and self.model is None:
            raise InputError(
                "--model-args are arguments of timm, and --preset names a network of this package",
                hint="leave --model-args out, or type --model NAME in place of --preset",
            )
        for name, option in (("seed", "--seed"), ("workers", "--workers"), ("save_steps", "--save-steps")):
            if getattr(self, name) < 0:
                raise InputError(f"{option}: expected at least 0, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """checkpoint, log: the files.  epochs, steps: of the run.  loss, accuracy: of the last epoch, from the log.
    test_images: the number of images of the accuracy; 0 without accuracy.
    """

    checkpoint: Path
    log: Path
    epochs: int
    steps: int
    loss: float
    accuracy: float | None
    test_images: int


def train(
    out: Path, options: TrainOptions, *, resume: bool = False, force: bool = False, on_progress: OnProgress = ignore
) -> TrainResult | None:
    """Train a network, and write the folder ``out`` (`training._files`).

    resume: continue the run in ``out`` from its last checkpoint.  force: replace an existing folder at ``out``.
    on_progress: called after every step.
    Returns None in every process but the first of several.
    Errors:
        InputError: the data, the network, the recipe and the options do not fit together, an image cannot be decoded,
            or the settings differ from those of the run to resume.
        OutputError: ``out`` exists, or cannot be written.  MissingDependencyError.
        GmmvitError: the loss is not finite; the last checkpoint remains.
    """
    require("torchvision", package="torchvision", extra="train")
    require("torch.utils.tensorboard", package="tensorboard", extra="train")
    with processes(options.device) as those:
        if those.first and not resume:
            require_free(out, force=force)
        data = _data(options)
        spec = _spec(options, data)
        seed_everything(options.seed)
        with warnings.catch_warnings():
            if not those.first:
                warnings.simplefilter("ignore")
            network = network_for_training(spec, drop_path=options.recipe.drop_path)
        trainer = Trainer(network, data, options.recipe, seed=options.seed, processes=those, workers=options.workers)
        settings = {
            "network": spec_to_json(spec),
            "preprocessing": data.image.to_json(),
            "labels": [*data.labels],
            **options.recipe.to_json(),
            "seed": options.seed,
            "training images": len(data.train),
            "processes": those.size,
        }
        log_bytes = load(out, trainer, settings) if resume else 0
        if those.first and not resume:
            with new_folder(out, force=force) as folder:
                save(folder, trainer, settings, log_bytes=0)  # a folder of a run always has a checkpoint
                (folder / LOG).touch()
        those.wait()  # no process goes on before the others have read the checkpoint
        if not those.first:
            for _ in trainer.run():
                pass
            return None
        _run(out, trainer, settings, log_bytes, options, those, on_progress)
    last = json.loads((out / LOG).read_text(encoding="utf-8").splitlines()[-1])
    return TrainResult(
        checkpoint=out / CHECKPOINT,
        log=out / LOG,
        epochs=options.recipe.epochs,
        steps=trainer.step,
        loss=last["loss"],
        accuracy=last["accuracy"],
        test_images=0 if data.test is None else len(data.test),
    )


def _run(
    out: Path,
    trainer: Trainer,
    settings: Mapping[str, Any],
    log_bytes: int,
    options: TrainOptions,
    those: Processes,
    on_progress: OnProgress,
) -> None:
    """Train to the end, and write the log and the checkpoints."""
    on_progress(Progress(f"on {those.size} × {those.device.type}", trainer.step, trainer.total_steps))
    accuracy = ""
    with closing(Log(out, size=log_bytes, step=trainer.step)) as log:
        for record in trainer.run():
            log.write(record)
            ends = isinstance(record, Epoch)
            if isinstance(record, Epoch) and record.accuracy is not None:
                accuracy = f", accuracy {record.accuracy:.2%}"
            # At the end of an epoch, the checkpoint follows the line of the epoch, so that no line is written twice.
            within = record.step % trainer.steps_of_epoch != 0
            if ends or (within and options.save_steps and record.step % options.save_steps == 0):
                save(out, trainer, settings, log_bytes=log.flushed_size())
            step = f"epoch {record.epoch} of {options.recipe.epochs}"
            on_progress(Progress(step, record.step, trainer.total_steps, f"loss {record.loss:.3f}{accuracy}"))


def _data(options: TrainOptions) -> TrainingData:
    kind = kind_of_data(options.data)
    train_images = open_data(options.data, split="train")
    test_name = options.test or held_out_of(options.data)
    test: Images | None = None if test_name is None else open_data(test_name)
    labels = labels_of(train_images, test)
    size = options.image_size or SIDES.get(kind)
    if size is None:
        raise InputError(
            f"--data {options.data}: the images can have any size, so the size for the network is not known",
            hint="add --image-size PIXELS",
        )
    image = ImageSpec(height=size, width=size, channels=options.channels, resize="stretch-bilinear")
    mean, std = options.mean, options.std
    if mean is None or std is None:
        known = DATASETS.get(kind)
        if known is not None and options.channels in (1, 3):
            mean, std = ((values * 3)[: options.channels] for values in (known.mean, known.std))
        else:
            mean, std = mean_and_std(train_images, image)
    image = replace(image, mean=mean, std=std, resize=options.resize, crop_pct=options.crop_pct)
    return TrainingData(train=train_images, test=test, image=image, labels=labels)


def _spec(options: TrainOptions, data: TrainingData) -> ModelSpec:
    classes, size, channels = len(data.labels), data.image.height, data.image.channels
    if options.preset is not None:
        return spec_of_preset(options.preset, classes=classes, image_size=size, channels=channels, mask=options.mask)
    return spec_of_timm(
        options.model or "",
        options.model_args,
        classes=classes,
        image_size=size,
        channels=channels,
        mask=options.mask,
    )
