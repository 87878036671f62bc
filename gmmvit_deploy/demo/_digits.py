"""Load the handwritten digits that scikit-learn contains, and train a small model on them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from gmmvit_deploy.demo.models import DemoModel
from gmmvit_deploy.images.data.formats import digits
from gmmvit_deploy.images.data.images import ArrayImages
from gmmvit_deploy.images.datasets import DATASETS
from gmmvit_deploy.progress import OnProgress, Progress, ignore
from gmmvit_deploy.training.images import TrainingData
from gmmvit_deploy.training.recipe import RECIPES
from gmmvit_deploy.training.trainer import Epoch, Trainer

_SEED = 7
Network = TypeVar("Network", bound=nn.Module)


@dataclass(frozen=True, slots=True, kw_only=True)
class Digits:
    """Pixels uint8 (B, height, width, c) and class indices (B,).

    train_pixels: in the size that the model takes.  held_out_pixels: in the size of the demo's PNG files.
    """

    train_pixels: NDArray[Any]
    train_classes: NDArray[Any]
    held_out_pixels: NDArray[Any]
    held_out_classes: NDArray[Any]


def load_digit_images(model: DemoModel[Any]) -> Digits:
    """Load the 1,797 digits in the sizes and channels of ``model``; the same 360 are held out in every run."""
    parts = [digits(split) for split in ("train", "test")]
    images = (model.image, model.png)
    pixels = [
        np.stack([part.pixels(index, image) for index in range(len(part))])
        for part, image in zip(parts, images, strict=True)
    ]
    classes = [np.array([part.label(index) for index in range(len(part))]) for part in parts]
    return Digits(
        train_pixels=pixels[0], train_classes=classes[0], held_out_pixels=pixels[1], held_out_classes=classes[1]
    )


def train(
    digits: Digits,
    model: DemoModel[Network],
    *,
    epochs: int,
    on_progress: OnProgress = ignore,
) -> Network:
    """Train a model by the recipe ``light`` of ``gmmvit train``, and return it in evaluation mode."""
    torch.manual_seed(_SEED)
    network = model.build().train()
    data = TrainingData(
        train=ArrayImages("digits train", digits.train_pixels, digits.train_classes),
        test=None,
        image=replace(model.image, resize="stretch-bilinear", crop_pct=1.0),  # the pixels have the model's size
        labels=DATASETS["digits"].labels,
    )
    trainer = Trainer(network, data, replace(RECIPES["light"], epochs=epochs), seed=_SEED)
    for record in trainer.run():
        if isinstance(record, Epoch):
            on_progress(Progress("train", record.epoch, epochs, f"loss {record.loss:.3f}"))
    return network.eval()
