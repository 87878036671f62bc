"""Values that the user gives because a checkpoint file may not contain them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.specs import CHANNELS, Interpolation, interpolation_named

__all__ = [
    "OWN_HINTS",
    "POOLS",
    "SOURCES",
    "TYPED_POOLS",
    "WEIGHTS_KINDS",
    "LoadHints",
    "OwnHint",
    "Pool",
    "TypedPool",
    "WeightsKind",
    "own_class_of",
]

WeightsKind: TypeAlias = Literal["trained", "averaged"]
"""trained: the weights after the last step of the optimiser.  averaged: the moving average (EMA) of the weights."""
WEIGHTS_KINDS: tuple[WeightsKind, ...] = get_args(WeightsKind)

Pool: TypeAlias = Literal["cls", "mean"]
"""What the classifier reads.  cls: the class token.  mean: the mean of all tokens."""
POOLS: tuple[Pool, ...] = get_args(Pool)
TypedPool: TypeAlias = Literal["cls", "mean", "pooler"]
"""A value of ``--pool``.  pooler: ``pooler_output`` of a backbone of Hugging Face transformers."""
TYPED_POOLS: tuple[TypedPool, ...] = get_args(TypedPool)

SOURCES = ("spt-lsa", "vit-pytorch")
"""Code bases whose files can have the same names and shapes of tensors, and other logits."""

OwnHint: TypeAlias = Literal["pool", "scale_adjustment", "transform_scale", "decomposed_stages", "model_args"]
"""A field of `LoadHints` that only the networks of some sources have (`CheckpointSource.own_hints`)."""
OWN_HINTS: tuple[OwnHint, ...] = get_args(OwnHint)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadHints:
    """Values of the command line's options; None for an option that is not given.

    heads: the number of attention heads; for a model with several stages, the number in the first stage.
    preset: a name of `families.PRESETS`.
    closed_form: True if the mask was trained with the closed formula of the paper
    "Toward a Deeper Understanding: RetNet Viewed through Convolution", which computes the mask from the distances
    of the tokens. Otherwise the file must contain the stored base mask of the paper authors' released code.
    image_size: the side of the images in pixels.  channels: the number of channels of the images.
    weights: the weights to load from a file that holds trained and averaged weights.
    model: the name of an architecture of timm, or ``torchvision:VisionTransformer``, or a class as ``FILE.py:CLASS``.
    model_args: the arguments with which the training code built the model.
    resize_to: the side in pixels of the images for which the model is built again after loading, if the side differs
    from the images of training.
    interpolation: the algorithm that resamples position embeddings for ``resize_to``; by default the algorithm of the
    code that wrote the file.
    head: the path of the file of a linear classifier for a backbone without classifier, such as a DINO backbone.
    head_blocks: the number of last blocks whose class tokens the linear classifier reads.
    head_average: True if the linear classifier also reads the mean of the patches.
    source: a name of `SOURCES`: the code that wrote the file, if the names of the tensors leave two possibilities.
    pool: what the classifier reads, or the features of a backbone, for a file that does not show it.
    scale_adjustment: the factor before each norm of a DeepViT, which its branches are divided by.
    transform_scale: True if the weights that a DeepViT mixes are also multiplied by 1/√d, with d the head dim.
    decomposed_stages: the stages of an RMT, counted from 1, whose attention is decomposed into rows and columns; empty
    if every stage attends to the whole grid.
    only_features: True if only the features of the network are needed, so that a file may have no classifier.
    Errors: InputError when a value is out of range.
    """

    heads: int | None = None
    preset: str | None = None
    closed_form: bool | None = None
    image_size: int | None = None
    channels: int | None = None
    weights: WeightsKind | None = None
    model: str | None = None
    model_args: Mapping[str, Any] = field(default_factory=dict)
    resize_to: int | None = None
    interpolation: Interpolation | None = None
    head: str | None = None
    head_blocks: int | None = None
    head_average: bool = False
    source: str | None = None
    pool: TypedPool | None = None
    scale_adjustment: float | None = None
    transform_scale: bool | None = None
    decomposed_stages: tuple[int, ...] | None = None
    only_features: bool = False

    def __post_init__(self) -> None:
        if self.image_size is not None and self.image_size < 1:
            raise InputError(f"--image-size: expected at least 1, got {self.image_size}")
        if self.resize_to is not None and self.resize_to < 1:
            raise InputError(f"--resize-to: expected at least 1, got {self.resize_to}")
        if self.interpolation is not None:
            interpolation_named(self.interpolation)
            if self.resize_to is None:
                raise InputError(
                    "--interpolation resamples position embeddings for another image size, and no such size is given",
                    hint="add --resize-to PIXELS, or leave --interpolation out",
                )
        if self.channels is not None and self.channels not in CHANNELS:
            raise InputError(f"--channels: expected one of {', '.join(map(str, CHANNELS))}, got {self.channels}")
        if self.heads is not None and self.heads < 1:
            raise InputError(f"--heads: expected at least 1, got {self.heads}")
        if self.weights not in (None, *WEIGHTS_KINDS):
            raise InputError(f"--weights: expected {' or '.join(WEIGHTS_KINDS)}, got {self.weights!r}")
        if self.head is not None and (self.head_blocks is None or self.head_blocks < 1):
            raise InputError(
                "--head: expected the number of blocks whose class tokens the head reads",
                hint="add --head-blocks N; DINO's evaluation uses 4 for ViT-S and 1 for ViT-B",
            )
        if self.head is None and (self.head_blocks is not None or self.head_average):
            raise InputError("--head-blocks and --head-average describe a linear head", hint="add --head FILE")
        self._check_network()

    def typed(self) -> dict[str, str]:
        """Return what the options state about the network: field → the option with its value, such as ``--heads 4``.

        ``model_args`` is left out: its values are those of the training code, for which this package has no names.
        """
        stages = self.decomposed_stages
        options = {
            "heads": self.heads,
            "image_size": self.image_size,
            "channels": self.channels,
            "weights": self.weights,
            "source": self.source,
            "pool": self.pool,
            "scale_adjustment": self.scale_adjustment,
            "decomposed_stages": None if stages is None else ",".join(map(str, stages)) or "none",
        }
        typed = {name: f"--{name.replace('_', '-')} {value}" for name, value in options.items() if value is not None}
        if self.transform_scale is not None:
            typed["transform_scale"] = f"--{'' if self.transform_scale else 'no-'}transform-scale"
        return typed

    def own(self) -> dict[OwnHint, str]:
        """Return field → the option as typed, for the fields of `OWN_HINTS` that the user gave."""
        typed = self.typed() | ({"model_args": "--model-args"} if self.model_args else {})
        return {name: typed[name] for name in OWN_HINTS if name in typed}

    def _check_network(self) -> None:
        if self.source not in (None, *SOURCES):
            raise InputError(f"--source: expected {' or '.join(SOURCES)}, got {self.source!r}")
        if self.pool not in (None, *TYPED_POOLS):
            raise InputError(f"--pool: expected {' or '.join(TYPED_POOLS)}, got {self.pool!r}")
        if self.scale_adjustment is not None and not 0 < self.scale_adjustment < math.inf:
            raise InputError(f"--scale-adjustment: expected a number above 0, got {self.scale_adjustment:g}")
        if self.decomposed_stages is not None and (
            min(self.decomposed_stages, default=1) < 1 or len({*self.decomposed_stages}) != len(self.decomposed_stages)
        ):
            given = ",".join(map(str, self.decomposed_stages))
            raise InputError(
                f"--decomposed-stages: expected different numbers of at least 1, got {given}",
                hint="type for example --decomposed-stages 1,2,3; the first stage has the number 1",
            )


def own_class_of(model: str | None) -> tuple[str, str] | None:
    """Return (path of the file, name of the class) of a ``--model FILE.py:CLASS``, or None for any other ``--model``.

    Errors: InputError when the text names a Python file without a class.
    """
    file, _, name = (model or "").rpartition(":")
    if file.endswith(".py") and name.isidentifier():
        return file, name
    if file.endswith(".py") or name.endswith(".py"):
        path = file if file.endswith(".py") else name
        raise InputError(
            f"--model: expected FILE.py:CLASS, got {model!r}",
            hint=f"type --model {path}:CLASS with a class of the file",
        )
    return None
