"""The networks that `gmmvit train` trains: presets of the families, and classifiers of timm, with or without masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gmmvit_deploy.errors import InputError, SpecError
from gmmvit_deploy.models.families import model_from_spec, preset_spec
from gmmvit_deploy.models.families.timm.network import architecture_from, require_timm
from gmmvit_deploy.models.families.timm.spec import CONV_STEM_VIT, TimmSpec
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.sources.hints import own_class_of
from gmmvit_deploy.models.specs import MaskKind, MaskSpec, ModelSpec

_KERNELS = 5


def spec_of_preset(preset: str, *, classes: int, image_size: int, channels: int, mask: MaskKind) -> ModelSpec:
    """A Gaussian mixture has 5 Gaussians for each head and a stored base, as in the released code.

    Errors: SpecError when the preset is unknown, or does not take the images or the mask.
    """
    masks = MaskSpec(kind=mask, kernels=_KERNELS if mask == "gmm" else 0)
    spec = preset_spec(preset, classes=classes, image_size=image_size, mask=masks)
    return spec if channels == spec.channels else replace(spec, channels=channels)


def spec_of_timm(
    name: str, arguments: Mapping[str, Any], *, classes: int, image_size: int, channels: int, mask: MaskKind
) -> TimmSpec:
    """A Gaussian mixture has 5 Gaussians for each head in the closed form.

    arguments: of ``timm.create_model``, beside the image size, the channels and the classes.
    Errors: InputError when ``name`` is no name of timm; SpecError when timm cannot build it for these images;
    MissingDependencyError.
    """
    if name == CONV_STEM_VIT or own_class_of(name) is not None:
        raise InputError(
            f"--model: expected the name of an architecture of timm, got {name!r}",
            hint="type a name such as vit_tiny_patch16_224, or --preset NAME",
        )
    architecture = architecture_from(name, where="--model")
    required = {**arguments, "in_chans": channels, "num_classes": classes}
    return TimmSpec(
        architecture=architecture,
        model_args=timm_arguments(architecture, required, image_size, ({"img_size": image_size}, {})),
        image_size=image_size,
        classes=classes,
        channels=channels,
        mask=MaskSpec(kind=mask, kernels=_KERNELS, closed_form=True) if mask == "gmm" else MaskSpec(kind=mask),
    )


def timm_arguments(
    architecture: str, required: Mapping[str, Any], image_size: int, sizes: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the arguments of ``timm.create_model`` for images of ``image_size`` × ``image_size`` pixels.

    sizes: arguments that set the size, in the order of preference.
    Errors: SpecError when timm builds the architecture for such images with none of ``sizes``.
    """
    reasons = []
    for size in sizes:
        arguments = {**size, **required}
        network = _tried(architecture, arguments, image_size)
        if isinstance(network, nn.Module):
            return {**arguments, **_for_masks(architecture, arguments, image_size, network)}
        reasons.append(f"with {size or 'no size'}: {network}")
    raise SpecError(
        f"--model: timm cannot build {architecture} for images of {image_size}×{image_size} pixels: "
        f"{'; '.join(reasons)}",
        hint="add --model test_vit, or another architecture that takes images of this size",
    )


def _for_masks(architecture: str, arguments: Mapping[str, Any], image_size: int, network: nn.Module) -> dict[str, Any]:
    """Return the arguments that let every mask have an effect, if the architecture takes them."""
    changed: dict[str, Any] = {}
    if getattr(network, "dynamic_img_size", False):
        changed["dynamic_img_size"] = False
    average = {**changed, "global_pool": "avg"}
    if getattr(network, "global_pool", None) == "token" and isinstance(
        _tried(architecture, {**arguments, **average}, image_size), nn.Module
    ):
        changed = average
    return changed


def _tried(architecture: str, arguments: Mapping[str, Any], image_size: int) -> nn.Module | Exception:
    """Build a network without weights and run it on two images.  Return the network, or the error."""
    try:
        with torch.device("meta"):
            network: nn.Module = require_timm().create_model(architecture, **arguments)
            network(torch.zeros(2, arguments["in_chans"], image_size, image_size))
    # The code of an architecture raises errors of any class for arguments and images that it does not take.
    except Exception as exc:
        return exc
    return network


def network_for_training(spec: ModelSpec, *, drop_path: float) -> Model:
    """Build the network of a spec with random weights, with stochastic depth, in training mode.

    drop_path: the probability of the last block, which grows from 0 in the first block. timm's networks apply it
    themselves; in the networks of this package, it applies to the attention and the mlp of every block.
    Errors: SpecError when timm's architecture takes no stochastic depth, or the network does not take the images.
    """
    if isinstance(spec, TimmSpec):
        if drop_path and "drop_path_rate" not in spec.model_args:
            spec = replace(spec, model_args={**spec.model_args, "drop_path_rate": drop_path})
        return model_from_spec(spec).train()
    model = model_from_spec(spec)
    _add_stochastic_depth(model, drop_path)
    return model.train()


def _add_stochastic_depth(model: Model, drop_path: float) -> None:
    blocks = [module for module in model.modules() if _branches(module)]
    for number, block in enumerate(blocks):
        rate = drop_path * number / max(len(blocks) - 1, 1)
        for branch in _branches(block) if rate else ():
            branch.register_forward_hook(_StochasticDepth(rate))


def _branches(block: nn.Module) -> list[nn.Module]:
    """Return the attention and the mlp of a residual block; an empty list for any other module."""
    held = dict(block.named_children())
    return [held["attention"], held["mlp"]] if {"attention", "mlp"} <= held.keys() else []


class _StochasticDepth:
    """A hook that replaces the output of a branch by 0 for random images, and scales the other outputs."""

    def __init__(self, rate: float) -> None:
        self._rate = rate

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        from torchvision.ops import stochastic_depth

        kept: Tensor = stochastic_depth(output, self._rate, "row", training=module.training)
        return kept
