"""Make the sets of photographs on which int8 is judged: a shifted set, and crops of photographs kept aside."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageFilter

Pixels = NDArray[np.uint8]
"""(N, height, width, 3)."""


def shifted(images: Pixels) -> Pixels:
    """Return the images as another camera takes them: blur, contrast, noise, colours, JPEG; always the same."""
    random = np.random.default_rng(3)
    result = []
    for pixels in images:
        shift = _SHIFTS[random.integers(len(_SHIFTS))]
        result.append(np.asarray(shift(Image.fromarray(pixels), random)))
    return np.stack(result)


def _blurred(image: Image.Image, random: np.random.Generator) -> Image.Image:
    return image.filter(ImageFilter.GaussianBlur(random.uniform(0.5, 2)))


def _contrast(image: Image.Image, random: np.random.Generator) -> Image.Image:
    return ImageEnhance.Contrast(image).enhance(random.choice([0.5, 0.7, 1.5, 2.0]))


def _noisy(image: Image.Image, random: np.random.Generator) -> Image.Image:
    pixels = np.asarray(image) + random.normal(0, random.uniform(5, 25), (*image.size[::-1], 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def _colours(image: Image.Image, random: np.random.Generator) -> Image.Image:
    return Image.fromarray((np.asarray(image) * random.uniform(0.7, 1.2, 3)).clip(0, 255).astype(np.uint8))


def _magnified(image: Image.Image, random: np.random.Generator) -> Image.Image:
    left, top = (np.array(image.size) * random.uniform(0.05, 0.2, 2)).astype(int).tolist()
    box = (left, top, image.width - left, image.height - top)
    return image.resize(image.size, Image.Resampling.BICUBIC, box=box)


def _compressed(image: Image.Image, random: np.random.Generator) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=int(random.integers(15, 50)))
    return Image.open(file).convert("RGB")


_SHIFTS = (_blurred, _contrast, _noisy, _colours, _magnified, _compressed)


def crops_of(folder: Path, side: int, count: int) -> Pixels:
    """Return ``count`` square crops of each photograph, resized to ``side`` pixels; always the same."""
    random = np.random.default_rng(4)
    result = []
    for path in sorted(folder.iterdir()):
        image = Image.open(path).convert("RGB")
        for _ in range(count):
            crop = int(random.uniform(0.3, 1) * min(image.size))
            left, top = (int(random.integers(0, length - crop + 1)) for length in image.size)
            box = (left, top, left + crop, top + crop)
            result.append(np.asarray(image.resize((side, side), Image.Resampling.BICUBIC, box=box, reducing_gap=3)))
    return np.stack(result)
