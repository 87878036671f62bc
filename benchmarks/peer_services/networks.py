"""The networks that are served: the bundle, the straight export, the images, and the answers of PyTorch."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from PIL import Image

from benchmarks.shared.families import as_released
from benchmarks.shared.straight_export import straight_graph
from benchmarks.shared.timm_architectures import ARCHITECTURES, network_of
from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.checkpoints.weights import model_from_bundle
from gmmvit_deploy.exporting.bundle_from_checkpoint import ExportOptions, bundle_from_checkpoint
from gmmvit_deploy.inference.preprocess import RESAMPLING
from gmmvit_deploy.parity.measures import ErrorMeasure
from gmmvit_deploy.parity.reference import Reference
from gmmvit_deploy.tolerances import limit_from_noise
from tests.random_bundles import random_bundle

_ROUNDING = 2e-6
"""A probability in an answer is float32, or the decimal number that float32 prints as."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A network and its images of ``size`` (width, height).  seconds: clients → time of a program in a round."""

    title: str
    size: tuple[int, int]
    encoding: str
    seconds: Mapping[int, int]

    def file(self, seed: int) -> bytes:
        return photograph(self.size, self.encoding, seed)


NETWORKS = {
    "vit32": Network(
        title="ViT d9 with a Gaussian mixture mask (32×32, K = 5)", size=(32, 32), encoding="PNG", seconds={1: 2, 16: 2}
    ),
    "vits224": Network(title="ViT-S of timm (224×224)", size=(500, 334), encoding="JPEG", seconds={1: 4, 16: 12}),
}


def photograph(size: tuple[int, int], encoding: str, seed: int) -> bytes:
    """Return an image file of smooth shapes with noise.  size: (width, height)."""
    generator = np.random.default_rng(seed)
    small = Image.fromarray(generator.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    smooth = np.asarray(small.resize(size, Image.Resampling.BICUBIC), np.int16)
    noisy = smooth + generator.integers(-6, 7, smooth.shape, dtype=np.int16)
    file = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, encoding)
    return file.getvalue()


def random_network(name: str, folder: Path) -> Bundle:
    """Write a bundle of a network with random weights to ``folder``."""
    if name == "vit32":
        return random_bundle(folder)
    architecture = ARCHITECTURES["vit_small_patch16_224"]
    checkpoint = folder / "vits224.pth"
    torch.save(network_of("vit_small_patch16_224", architecture).state_dict(), checkpoint)
    options = ExportOptions(mean=(0.5,) * 3, std=(0.5,) * 3, resize="center-bicubic", crop_pct=0.9)
    hints = architecture.hints("vit_small_patch16_224")
    return bundle_from_checkpoint(checkpoint, folder / "bundle", options, hints=hints)


def write_straight(bundle: Bundle, path: Path) -> None:
    """Write what users without this project run: the export of the unchanged module, which takes normalised images."""
    manifest = bundle.manifest
    model = as_released(model_from_bundle(manifest, bundle.weights_path))
    ir.save(straight_graph(model, manifest.image.tensor_shape, manifest.max_batch), path)


def preprocessing(bundle: Bundle) -> dict[str, Any]:
    """Return the preprocessing of a bundle for `classifier.py`.  Errors: SystemExit for a resize rule that it lacks."""
    image = bundle.manifest.image
    fit, resampling = RESAMPLING[image.resize]
    if fit not in ("stretch", "center") or image.height != image.width or image.channels != 3:
        raise SystemExit(f"{bundle.path}: expected square RGB images and a resize rule stretch or center")
    names = ("height", "width", "mean", "std", "crop_pct")
    return {**{name: getattr(image, name) for name in names}, "fit": fit, "filter": resampling}


class Expected:
    """PyTorch's answers to some image files, and the limits of parity for float32."""

    def __init__(self, bundle: Bundle, files: list[bytes]) -> None:
        self.pixels = np.stack([bundle.manifest.image.pixels_from_bytes(file) for file in files])
        trained, exact = Reference(bundle).logits(bundle.inputs_from_pixels(self.pixels))
        measure = ErrorMeasure()
        measure.add(trained, exact)
        self._limit = limit_from_noise(measure.noise()).largest
        self._log_shares = exact - np.log(np.exp(exact - exact.max(1, keepdims=True)).sum(1, keepdims=True))
        self._log_shares -= exact.max(1, keepdims=True)

    def wrong(self, number: int, answer: Mapping[int, float]) -> str:
        """Return what is wrong with a float32 answer, class → probability of the likeliest classes; "" if nothing is.

        The logarithm of a probability differs by at most twice as much as the logits do.
        """
        expected = self._log_shares[number]
        shares = np.array(list(answer.values()))
        with np.errstate(divide="ignore"):
            off = float(np.abs(np.log(shares) - expected[list(answer)]).max())
        limit = 2 * self._limit + _ROUNDING
        if not self.same_class(number, answer):
            return f"image {number}: class {max(answer, key=lambda i: answer[i])}, expected {int(expected.argmax())}"
        if not off <= limit:
            return f"image {number}: log-probabilities differ by {off:.2g}, expected at most {limit:.2g}"
        return ""

    def same_class(self, number: int, answer: Mapping[int, float]) -> bool:
        return max(answer, key=lambda index: answer[index]) == int(self._log_shares[number].argmax())
