"""Values that the user gives because a checkpoint file may not contain them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.specs import CHANNELS

__all__ = ["WEIGHTS_KINDS", "LoadHints", "WeightsKind", "own_class_of"]

WeightsKind: TypeAlias = Literal["trained", "averaged"]
"""trained: the weights after the last step of the optimiser.  averaged: the moving average (EMA) of the weights."""
WEIGHTS_KINDS: tuple[WeightsKind, ...] = get_args(WeightsKind)


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
    model: the class of the model, as ``FILE.py:Class``.
    model_args: the arguments of the model by name, as JSON values.
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

    def __post_init__(self) -> None:
        if self.image_size is not None and self.image_size < 1:
            raise InputError(f"--image-size: expected at least 1, got {self.image_size}")
        if self.channels is not None and self.channels not in CHANNELS:
            raise InputError(f"--channels: expected one of {', '.join(map(str, CHANNELS))}, got {self.channels}")
        if self.heads is not None and self.heads < 1:
            raise InputError(f"--heads: expected at least 1, got {self.heads}")
        if self.weights not in (None, *WEIGHTS_KINDS):
            raise InputError(f"--weights: expected {' or '.join(WEIGHTS_KINDS)}, got {self.weights!r}")


def own_class_of(model: str | None) -> tuple[str, str] | None:
    """Return (path of the file, name of the class) of a ``--model FILE.py:Class``, or None for any other ``--model``.

    Errors: InputError when the text names a Python file without a class.
    """
    file, _, name = (model or "").rpartition(":")
    if file.endswith(".py") and name.isidentifier():
        return file, name
    if file.endswith(".py") or name.endswith(".py"):
        path = file if file.endswith(".py") else name
        raise InputError(
            f"--model: expected FILE.py:Class, got {model!r}",
            hint=f"type --model {path}:CLASS with a class of the file",
        )
    return None
