"""Load the handwritten digits that scikit-learn contains, and train a small GMM-ViT on them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from gmmvit_deploy.checkpoints.loading import released_state_dict
from gmmvit_deploy.data.formats import digits
from gmmvit_deploy.datasets import dataset
from gmmvit_deploy.families import family_named, model_from_spec
from gmmvit_deploy.images import ImageSpec
from gmmvit_deploy.layers.model import Model
from gmmvit_deploy.preprocess import tensor_from_pixels
from gmmvit_deploy.progress import OnProgress, Progress, ignore
from gmmvit_deploy.specs import MaskSpec, ModelSpec

__all__ = ["DIGITS_SPEC", "Digits", "load_digit_images", "save_checkpoint", "train"]

_SEED = 7
_IMAGE_SIZE = 32

DIGITS_SPEC: ModelSpec = family_named("vit").spec(
    image_size=_IMAGE_SIZE,
    patch_size=4,
    classes=10,
    dim=64,
    depth=4,
    heads=4,
    head_dim=16,
    mlp_dim=128,
    class_token=False,
    mask=MaskSpec(kind="gmm", kernels=5),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Digits:
    """Pixels uint8 (B, 32, 32, 3) and class indices (B,), for training and for the held-out test."""

    train_pixels: NDArray[Any]
    train_classes: NDArray[Any]
    held_out_pixels: NDArray[Any]
    held_out_classes: NDArray[Any]


def load_digit_images() -> Digits:
    """Load the 1,797 digits, and enlarge the digits from 8×8 grey to 32×32 RGB.

    The same 360 digits are held out in every run.
    """
    image = ImageSpec(height=_IMAGE_SIZE, width=_IMAGE_SIZE, channels=DIGITS_SPEC.channels)
    parts = [digits(split) for split in ("train", "test")]
    pixels = [np.stack([part.pixels(index, image) for index in range(len(part))]) for part in parts]
    classes = [np.array([part.label(index) for index in range(len(part))]) for part in parts]
    return Digits(
        train_pixels=pixels[0], train_classes=classes[0], held_out_pixels=pixels[1], held_out_classes=classes[1]
    )


def train(
    digits: Digits,
    *,
    epochs: int,
    batch: int = 64,
    on_progress: OnProgress = ignore,
) -> Model:
    """Train `DIGITS_SPEC` from scratch with AdamW, a one-cycle schedule, and random shifts by up to two pixels.

    on_progress: called after each epoch, with the mean loss of the epoch as the detail.
    """
    torch.manual_seed(_SEED)
    normalisation = dataset("digits")
    images = torch.from_numpy(tensor_from_pixels(digits.train_pixels, normalisation.mean, normalisation.std))
    classes = torch.from_numpy(digits.train_classes).long()
    model = model_from_spec(DIGITS_SPEC).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    steps = epochs * -(-len(images) // batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps, pct_start=0.2)
    for epoch in range(1, epochs + 1):
        losses = []
        for rows in torch.randperm(len(images)).split(batch):
            shift = tuple(int(s) for s in torch.randint(-2, 3, (2,)))
            logits = model(images[rows].roll(shift, dims=(2, 3)))
            loss = functional.cross_entropy(logits, classes[rows], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(float(loss.detach()))
        on_progress(Progress("train", epoch, epochs, f"loss {sum(losses) / len(losses):.3f}"))
    return model.eval()


def save_checkpoint(model: Model, path: Path, *, epoch: int) -> None:
    """Write a checkpoint like the paper authors' released training code: the weights are in ``model_state_dict``.

    The paper is "Toward a Deeper Understanding: RetNet Viewed through Convolution".
    """
    state = released_state_dict(model)
    # The paper authors' released code stores an unused copy of the base mask under the additional key ``mask``.
    bases = [tensor for name, tensor in state.items() if name.endswith(".mask.mask")]
    state = {"mask": bases[0], **state}
    torch.save({"model_state_dict": state, "epoch": epoch}, path)
