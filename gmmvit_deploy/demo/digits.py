"""Load the handwritten digits that scikit-learn contains, and train a small model on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from gmmvit_deploy.data.formats import digits
from gmmvit_deploy.demo.models import DemoModel
from gmmvit_deploy.progress import OnProgress, Progress, ignore

__all__ = ["Digits", "load_digit_images", "train"]

_SEED = 7
Network = TypeVar("Network", bound=nn.Module)


@dataclass(frozen=True, slots=True, kw_only=True)
class Digits:
    """Pixels uint8 (B, height, width, c) and class indices (B,), for training and for the held-out test.

    train_pixels: in the size that the model takes.  held_out_pixels: in the size of the demo's PNG files.
    """

    train_pixels: NDArray[Any]
    train_classes: NDArray[Any]
    held_out_pixels: NDArray[Any]
    held_out_classes: NDArray[Any]


def load_digit_images(model: DemoModel[Any]) -> Digits:
    """Load the 1,797 digits, which are grey and have 8×8 pixels, in the sizes and channels of ``model``.

    The same 360 digits are held out in every run.
    """
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
    batch: int = 64,
    on_progress: OnProgress = ignore,
) -> Network:
    """Train a model from scratch with AdamW, a one-cycle schedule, and random shifts by up to two pixels.

    on_progress: called after each epoch, with the mean loss of the epoch as the detail.
    Returns the trained network in evaluation mode.
    """
    torch.manual_seed(_SEED)
    images = torch.from_numpy(model.image.tensor_from_pixels(digits.train_pixels))
    classes = torch.from_numpy(digits.train_classes).long()
    network = model.build().train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=0.05)
    steps = epochs * -(-len(images) // batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps, pct_start=0.2)
    for epoch in range(1, epochs + 1):
        losses = []
        for rows in torch.randperm(len(images)).split(batch):
            shift = tuple(int(s) for s in torch.randint(-2, 3, (2,)))
            logits = network(images[rows].roll(shift, dims=(2, 3)))
            loss = functional.cross_entropy(logits, classes[rows], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(float(loss.detach()))
        on_progress(Progress("train", epoch, epochs, f"loss {sum(losses) / len(losses):.3f}"))
    return network.eval()
