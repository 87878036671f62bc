"""What a bundle is held to for good: inputs and images, and the logits that the trained module gives for them."""

from __future__ import annotations

import copy
import io
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from gmmvit_deploy.golden import GoldenSet
from gmmvit_deploy.preprocess import pixels_from_bytes, tensor_from_pixels
from gmmvit_deploy.tolerances import Noise

if TYPE_CHECKING:
    from gmmvit_deploy.artifacts import InputKind, Preprocessing
    from gmmvit_deploy.models.build import Model

__all__ = ["golden_from_model"]

_SEED = 20230905
_BATCH = 8


def golden_from_model(
    model: Model, input_kind: InputKind, preprocessing: Preprocessing | None
) -> tuple[GoldenSet, Noise]:
    """The golden set of a trained model, before any folding, and its float32 noise on it."""
    size = model.spec.image_size
    generator = np.random.default_rng(_SEED)
    if input_kind == "pixels" and preprocessing is not None:
        inputs = _pixels(generator, size)
        tensors = tensor_from_pixels(inputs, preprocessing.mean, preprocessing.std)
    else:
        inputs = tensors = generator.standard_normal((_BATCH, 3, size, size), dtype=np.float32)
    images = _images(generator, size) if preprocessing is not None else ()
    decoded = np.array([pixels_from_bytes(image, size) for image in images], np.uint8).reshape(-1, size, size, 3)
    everything = tensors
    if preprocessing is not None:
        everything = np.concatenate([tensors, tensor_from_pixels(decoded, preprocessing.mean, preprocessing.std)])
    with torch.inference_mode():
        logits = model(torch.from_numpy(everything)).numpy()
        exact = copy.deepcopy(model).double()(torch.from_numpy(everything).double()).numpy()
    errors = logits - exact
    noise = Noise(
        largest=float(np.abs(errors).max()),
        rms=float(np.sqrt((errors**2).mean())),
        scale=float(np.abs(exact).max()),
    )
    golden = GoldenSet(
        inputs=inputs,
        tensors=tensors,
        logits=logits[: len(tensors)],
        images=images,
        image_pixels=decoded,
        image_logits=logits[len(tensors) :],
    )
    return golden, noise


def _pixels(generator: np.random.Generator, size: int) -> NDArray[Any]:
    """Noise, ramps, black and white: every value of a channel occurs, and both ends."""
    pixels = generator.integers(0, 256, (_BATCH, size, size, 3), dtype=np.uint8)
    ramp = np.linspace(0, 255, size).astype(np.uint8)
    pixels[0] = ramp[None, :, None]
    pixels[1] = ramp[:, None, None]
    pixels[2], pixels[3] = 0, 255
    return pixels


def _images(generator: np.random.Generator, size: int) -> tuple[bytes, ...]:
    """Encoded images that take every way through the decoder: sizes, proportions, modes and formats."""
    from PIL import Image

    def drawn(width: int, height: int) -> Image.Image:
        """A coloured scene with edges: smooth where a photograph is, sharp where it is."""
        coarse = generator.integers(0, 256, (4, 5, 3), dtype=np.uint8)
        scene = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)).copy()
        scene[height // 3 : height // 2, width // 4 : width // 2] = generator.integers(0, 256, 3)
        return Image.fromarray(scene)

    def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
        file = io.BytesIO()
        image.save(file, kind, **options)
        return file.getvalue()

    half_seen = drawn(size, size)
    half_seen.putalpha(128)
    return (
        encoded(drawn(size, size), "PNG"),
        encoded(drawn(2 * size - 1, size + size // 2 + 1), "PNG"),
        encoded(drawn(size + 3, 3 * size).convert("L"), "PNG"),
        encoded(half_seen, "PNG"),
        encoded(drawn(2 * size, 2 * size).quantize(32), "PNG"),
        encoded(drawn(size // 2, size // 2), "BMP"),
        encoded(drawn(size * 2, size), "WEBP", lossless=True),
    )
