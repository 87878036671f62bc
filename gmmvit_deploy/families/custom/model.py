"""A module of the user's own class, as a model of this package."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.families.custom.permission import OwnFile, permitted_file
from gmmvit_deploy.families.custom.running import errors_of_file, network_of_class
from gmmvit_deploy.families.custom.spec import CustomSpec
from gmmvit_deploy.layers.model import Model

__all__ = ["CustomModel", "build", "classes_of"]

_BATCH = 2


class CustomModel(Model):
    """Images (B, c, S, S), normalised, float32 → logits (B, C), by a module of the user's own class.

    network: the user's module, whose operators declare no role.
    """

    foreign = True

    def __init__(self, spec: CustomSpec, network: nn.Module) -> None:
        super().__init__()
        self.spec = spec
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.network(images)
        return logits


def build(spec: CustomSpec) -> CustomModel:
    """Build the user's class, in a process that may run the user's file.

    The class is built on the CPU even under ``torch.device("meta")``, because a constructor may read values of tensors.
    Errors: InputError when this process must not run the file, or when the class cannot be built.
    """
    file = permitted_file(spec)
    with torch.device("cpu"):
        return CustomModel(spec, network_of_class(file, spec.class_name, spec.model_args))


def classes_of(file: OwnFile, name: str, network: nn.Module, shape: tuple[int, int, int]) -> int:
    """Return C, the number of classes, from the output of a dry run with two images.

    The dry run also computes the logits in float64, which parity needs as the reference.
    shape: (channels, height, width) of an image.
    Errors: InputError when the class raises an exception, or when the output is not a tensor (2, C) of logits.
    """
    height, width = shape[1:]
    what = f"the class {name} cannot compute the logits of images of {shape[0]} × {height} × {width}"
    images = torch.zeros(_BATCH, *shape)
    network = network.eval()
    with torch.inference_mode(), errors_of_file(file, what):
        output = network(images)
    if (problem := _problem(output)) is not None:
        raise InputError(
            f"{file.path}: expected the class {name} to output logits, a float32 tensor of shape (batch, classes), "
            f"got {problem}",
            hint=f"write a class in {file.path} whose forward returns only the logits, and name this class in --model",
        )
    with torch.inference_mode(), errors_of_file(file, f"the class {name} cannot compute in float64, as parity needs"):
        copy.deepcopy(network).double()(images.double())
    return int(output.shape[1])


def _problem(output: object) -> str | None:
    """Return what is wrong with the output of a batch of two images, or None if the output is a tensor (2, C)."""
    if not isinstance(output, Tensor):
        count = f" of {len(output)} values" if isinstance(output, tuple | list | dict) else ""
        return f"a {type(output).__name__}{count}"
    shape = tuple(output.shape)
    if output.ndim != 2 or shape[0] != _BATCH or shape[1] < 1:
        return f"a tensor of shape {shape} for a batch of {_BATCH} images"
    return None if output.dtype == torch.float32 else f"a tensor of {output.dtype}"
