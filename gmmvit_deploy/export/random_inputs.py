"""Random images that are not stored in bundles: conversion and parity make the same images again."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.bundle.artifacts import Bundle

__all__ = ["RANDOM", "fresh_inputs"]

RANDOM = 32
"""The number of random inputs of a parity run."""
_SEED = 1


def fresh_inputs(bundle: Bundle, count: int, *, seed: int = _SEED) -> NDArray[Any]:
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
