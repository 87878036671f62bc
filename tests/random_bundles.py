"""Write bundles of the paper's ViT with random weights, for tests and scripts that start a server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.demo.models import save_checkpoint
from gmmvit_deploy.exporting.bundle_from_checkpoint import ExportOptions, bundle_from_checkpoint
from gmmvit_deploy.images.datasets import DATASETS
from gmmvit_deploy.models.families import model_from_spec, preset_spec
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.specs import MaskSpec


def random_vit(*, seed: int = 0, **changes: Any) -> Model:
    """Return a ViT d9 for CIFAR-10 with a Gaussian mixture mask (K = 5) and random weights.

    changes: fields of the spec that differ from ViT d9, such as ``depth``.
    """
    torch.manual_seed(seed)
    spec = preset_spec("vit", classes=10, image_size=32, mask=MaskSpec(kind="gmm", kernels=5))
    return model_from_spec(replace(spec, **changes)).eval()


def fine_tuned(model: Model, *, share: float, seed: int = 1) -> Model:
    """Change every weight of a model in place by noise with ``share`` of the standard deviation of its tensor."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() > 1:
                parameter += share * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return model


def bundle_of(model: Model, folder: Path, *, name: str = "bundle") -> Bundle:
    """Write a bundle to ``folder/name``.  The input is pixels; the normalisation and the labels are CIFAR-10's."""
    checkpoint = folder / f"{name}.pth"
    save_checkpoint(model, checkpoint, epoch=0)
    cifar10 = DATASETS["cifar10"]
    options = ExportOptions(mean=cifar10.mean, std=cifar10.std, labels=cifar10.labels)
    return bundle_from_checkpoint(checkpoint, folder / name, options)


def random_bundle(folder: Path) -> Bundle:
    """Write a bundle of ViT d9 with a Gaussian mixture mask (K = 5) and random weights to ``folder``."""
    return bundle_of(random_vit(), folder)
