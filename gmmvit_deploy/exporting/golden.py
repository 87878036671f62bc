"""Make the inputs of a bundle on which the logits of every runner are compared with PyTorch's.

The golden set holds inputs, encoded images, and the logits that the trained model computes for the inputs and images.
Random images are not stored in bundles: conversion and parity make the same images again.
A runner is a runtime, engine or server that computes logits.
"""

from __future__ import annotations

import copy
import io
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.bundle.golden import GoldenSet
from gmmvit_deploy.tolerances import Noise

if TYPE_CHECKING:
    from gmmvit_deploy.bundle.artifacts import Bundle, InputKind
    from gmmvit_deploy.images.spec import ImageSpec
    from gmmvit_deploy.models.layers.model import Model

_SEED = 20230905
_BATCH = 8
RANDOM = 32
"""The number of random inputs of a parity run."""


def golden_from_model(model: Model, input_kind: InputKind, image: ImageSpec) -> tuple[GoldenSet, tuple[Noise, ...]]:
    """Compute the golden set of a trained model, before the model is folded.

    Returns (the golden set, the noise of each output). The noise is the difference between the float32 values and the
    float64 values of the output.
    """
    import torch

    generator = np.random.default_rng(_SEED)
    normalised = image.normalisation is not None
    if input_kind == "pixels":
        inputs = _pixels(generator, image)
        tensors = image.tensor_from_pixels(inputs)
    else:
        inputs = tensors = generator.standard_normal((_BATCH, *image.tensor_shape), dtype=np.float32)
    images = _images(generator, width=image.width, height=image.height) if normalised else ()
    decoded = np.array([image.pixels_from_bytes(data) for data in images], np.uint8).reshape(-1, *image.pixels_shape)
    everything = np.concatenate([tensors, image.tensor_from_pixels(decoded)]) if normalised else tensors
    with torch.inference_mode():
        answers = [answer.numpy() for answer in model.answers(torch.from_numpy(everything))]
        exact = copy.deepcopy(model).double().answers(torch.from_numpy(everything).double())
    noises = tuple(_noise(answer, true.numpy()) for answer, true in zip(answers, exact, strict=True))
    logits, features = answers[0], answers[1] if len(answers) > 1 else None
    golden = GoldenSet(
        inputs=inputs,
        tensors=tensors,
        logits=logits[: len(tensors)],
        images=images,
        image_pixels=decoded,
        image_logits=logits[len(tensors) :],
        output=model.outputs[0],
        features=None if features is None else features[: len(tensors)],
        image_features=None if features is None else features[len(tensors) :],
    )
    return golden, noises


def _noise(answers: NDArray[Any], exact: NDArray[Any]) -> Noise:
    errors = answers - exact
    return Noise(
        largest=float(np.abs(errors).max()),
        rms=float(np.sqrt((errors**2).mean())),
        scale=float(np.abs(exact).max()),
    )


def _pixels(generator: np.random.Generator, image: ImageSpec) -> NDArray[Any]:
    """Generate two ramps, a black image, a white image and noise images as uint8 (B, height, width, channels)."""
    pixels = generator.integers(0, 256, (_BATCH, *image.pixels_shape), dtype=np.uint8)
    pixels[0] = np.linspace(0, 255, image.width).astype(np.uint8)[None, :, None]
    pixels[1] = np.linspace(0, 255, image.height).astype(np.uint8)[:, None, None]
    pixels[2], pixels[3] = 0, 255
    return pixels


def _images(generator: np.random.Generator, *, width: int, height: int) -> tuple[bytes, ...]:
    """Encode images of various sizes, aspect ratios, colour modes and lossless file formats."""
    from PIL import Image

    def drawn(width: int, height: int) -> Image.Image:
        """Draw a coloured scene with smooth areas and sharp edges, like a photograph."""
        coarse = generator.integers(0, 256, (4, 5, 3), dtype=np.uint8)
        scene = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)).copy()
        scene[height // 3 : height // 2, width // 4 : width // 2] = generator.integers(0, 256, 3)
        return Image.fromarray(scene)

    def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
        file = io.BytesIO()
        image.save(file, kind, **options)
        return file.getvalue()

    half_seen = drawn(width, height)
    half_seen.putalpha(128)
    return (
        encoded(drawn(width, height), "PNG"),
        encoded(drawn(2 * width - 1, height + height // 2 + 1), "PNG"),
        encoded(drawn(width + 3, 3 * height).convert("L"), "PNG"),
        encoded(half_seen, "PNG"),
        encoded(drawn(2 * width, 2 * height).quantize(32), "PNG"),
        encoded(drawn(width // 2, height // 2), "BMP"),
        encoded(drawn(width * 2, height), "WEBP", lossless=True),
    )


def fresh_inputs(bundle: Bundle, count: int, *, seed: int = 1) -> NDArray[Any]:
    """Return ``count`` random images in the form of the graph's input: noisy patches of colour, of varying contrast.

    The images are not white noise, because a vision transformer gives nearly the same logits for every image of white
    noise: a row with the logits of another row would go unnoticed.
    """
    generator = np.random.default_rng(seed)
    height, width, channels = bundle.manifest.image.pixels_shape
    rows, columns = max(1, height // 4) + 1, max(1, width // 4) + 1
    coarse = generator.standard_normal((count, 5, 5, channels))
    patches = coarse.repeat(rows, axis=1).repeat(columns, axis=2)[:, :height, :width]
    scene = (
        patches * generator.uniform(0.2, 1.5, (count, 1, 1, 1))
        + generator.standard_normal((count, 1, 1, channels)) * 0.5
    )
    scene += 0.1 * generator.standard_normal(scene.shape)
    if bundle.manifest.input_kind == "pixels":
        pixels: NDArray[Any] = np.clip(128 + 64 * scene, 0, 255).astype(np.uint8)
        return pixels
    return np.ascontiguousarray(np.moveaxis(scene, -1, 1), dtype=np.float32)
