"""Write a bundle of the paper's ViT with random weights, for scripts that start a server."""

from __future__ import annotations

from pathlib import Path

import torch

from gmmvit_deploy.artifacts import Bundle
from gmmvit_deploy.datasets import dataset
from gmmvit_deploy.demo.models import save_checkpoint
from gmmvit_deploy.export.bundle_from_checkpoint import ExportOptions, bundle_from_checkpoint
from gmmvit_deploy.families import model_from_spec, preset_spec
from gmmvit_deploy.specs import MaskSpec

__all__ = ["random_bundle"]


def random_bundle(folder: Path) -> Bundle:
    """Write a bundle of ViT d9 with a Gaussian mixture mask (K = 5) and random weights to ``folder``.

    The input is pixels, and the normalisation and the labels are those of CIFAR-10.
    """
    torch.manual_seed(0)
    model = model_from_spec(preset_spec("vit", classes=10, image_size=32, mask=MaskSpec(kind="gmm", kernels=5))).eval()
    save_checkpoint(model, folder / "checkpoint.pth", epoch=0)
    cifar10 = dataset("cifar10")
    options = ExportOptions(mean=cifar10.mean, std=cifar10.std, labels=cifar10.labels)
    return bundle_from_checkpoint(folder / "checkpoint.pth", folder / "bundle", options)
