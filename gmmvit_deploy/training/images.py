"""Images for training: decoded and resized as a server does it, then augmented with torchvision's transforms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from gmmvit_deploy.errors import ImageError, InputError
from gmmvit_deploy.extras import require
from gmmvit_deploy.images.data.images import Images, evenly_spaced
from gmmvit_deploy.images.names import shown_names
from gmmvit_deploy.images.spec import ImageSpec, image_from_pixels
from gmmvit_deploy.training._batches import Key, seed_image
from gmmvit_deploy.training.recipe import Recipe

Batch = tuple[Tensor, Tensor] | ImageError
"""Images float32 (B, c, S, S) and classes int64 (B,); an error in their place if an image cannot be decoded."""

_AREA, _ASPECT = (0.02, 0.4), (0.3, 3.33)  # of random erasing, as in the released code
_MAX_MEASURED = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingData:
    """The images of a run.  train: to train on.  test: to measure the accuracy; None to measure no accuracy.

    image: the images that the network takes, with mean and std.  labels: the class names in the order of the index.
    """

    train: Images
    test: Images | None
    image: ImageSpec
    labels: tuple[str, ...]


class LabelledTensors(Dataset[tuple[Tensor, int] | ImageError]):
    """Images as normalised tensors, with their classes.  recipe: its augmentations, or None for none."""

    def __init__(self, images: Images, image: ImageSpec, recipe: Recipe | None = None) -> None:
        self._images, self._image = images, image
        self._augment = None if recipe is None else _augmentations(recipe, image)
        self._erase = None if recipe is None else _erasing(recipe, image)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, key: Key) -> tuple[Tensor, int] | ImageError:
        index, seed = key
        try:
            pixels = self._images.pixels(index, self._image)
        except ImageError as exc:  # a worker process would put its traceback into the message
            return exc
        seed_image(seed)
        if self._augment is not None:
            pixels = np.asarray(self._augment(image_from_pixels(pixels))).reshape(pixels.shape)
        tensor = torch.from_numpy(self._image.tensor_from_pixels(pixels))
        return (tensor if self._erase is None else self._erase(tensor)), class_of(self._images, index) or 0


def collated(items: Sequence[tuple[Tensor, int] | ImageError]) -> Batch:
    """Return the items as a batch, or the first error among them."""
    tensors, classes = [], []
    for item in items:
        if isinstance(item, ImageError):
            return item
        tensors.append(item[0])
        classes.append(item[1])
    return torch.stack(tensors), torch.tensor(classes)


def _augmentations(recipe: Recipe, image: ImageSpec) -> Callable[[Any], Any] | None:
    transforms = require("torchvision.transforms", package="torchvision", extra="train")
    steps = []
    if recipe.padding:
        steps.append(transforms.RandomCrop((image.height, image.width), padding=recipe.padding))
    if recipe.flip:
        steps.append(transforms.RandomHorizontalFlip())
    if recipe.policy != "none":
        if image.channels not in (1, 3):
            raise InputError(
                f"AutoAugment changes grey and RGB images, and the network takes {image.channels} channels",
                hint="add --auto-augment none",
            )
        steps.append(transforms.AutoAugment(transforms.AutoAugmentPolicy[recipe.policy.upper()]))
    composed: Callable[[Any], Any] = transforms.Compose(steps)
    return composed if steps else None


def _erasing(recipe: Recipe, image: ImageSpec) -> Callable[[Tensor], Tensor] | None:
    if not recipe.erasing or image.mean is None:
        return None
    transforms = require("torchvision.transforms", package="torchvision", extra="train")
    erase: Callable[[Tensor], Tensor] = transforms.RandomErasing(recipe.erasing, _AREA, _ASPECT, value=[*image.mean])
    return erase


def class_of(images: Images, index: int) -> int | None:
    label = images.label(index)
    if isinstance(label, tuple):
        raise InputError(
            f"{images.where(index)}: expected a single class for each image, the data has several labels for an image",
            hint="gmmvit train trains networks with a single label; train a multi-label network in a loop of your own",
        )
    return label


def labels_of(train: Images, test: Images | None) -> tuple[str, ...]:
    """Return the class names of the data, or the numbers of the classes if the data has no names.

    Errors: InputError when an image has no or an unknown class, the splits have different classes, or there are fewer
    than two.
    """
    if test is not None and train.classes != test.classes:
        differing = sorted({*train.classes} ^ {*test.classes}) or ["their order"]
        raise InputError(
            f"{train.name} and {test.name}: expected the same classes in the same order, they differ in "
            f"{shown_names(differing[:5])}"
        )
    classes = [(part, index, class_of(part, index)) for part in (train, test) if part for index in range(len(part))]
    for part, index, label in classes:
        if label is None:
            raise InputError(
                f"{part.where(index)}: expected the class of each image",
                hint="put the images of each class into a folder with the name of the class, or add the array labels",
            )
    count = 1 + max(label or 0 for _, _, label in classes)
    names = train.classes or tuple(map(str, range(count)))
    for part, index, label in classes:
        if not 0 <= (label or 0) < len(names):
            raise InputError(f"{part.where(index)}: expected a class from 0 to {len(names) - 1}, got {label}")
    if len(names) < 2:
        raise InputError(f"{train.name}: expected at least two classes, got {', '.join(names)}")
    return names


def mean_and_std(images: Images, image: ImageSpec) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel, for pixel values scaled to [0, 1], rounded to 4 places.

    Of more than 10,000 images, 10,000 evenly spaced images are read.
    Errors: ImageError when an image cannot be decoded; InputError when a channel has the same value everywhere.
    """
    chosen = evenly_spaced(len(images), _MAX_MEASURED).tolist()
    sums = squares = np.zeros(image.channels)
    for index in chosen:
        values = images.pixels(index, image).reshape(-1, image.channels) / 255
        sums, squares = sums + values.mean(0), squares + (values**2).mean(0)
    mean = sums / len(chosen)
    std = np.sqrt(np.maximum(squares / len(chosen) - mean**2, 0))
    if std.min() < 1e-4:
        raise InputError(
            f"{images.name}: a channel has the same value in every pixel, so it cannot be normalised",
            hint="type --mean and --std, or use other images",
        )
    return tuple(round(float(value), 4) for value in mean), tuple(round(float(value), 4) for value in std)
