"""Resize a loaded model to the image size of the option ``--resize-to``."""

from __future__ import annotations

from gmmvit_deploy.errors import CheckpointError, InputError
from gmmvit_deploy.models.families import FAMILIES, family_of
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.models.specs import Interpolation

_LEAVE_OUT = "leave --resize-to out; gmmvit then exports the model at the image size of the training"


def resized_as_asked(model: Model, hints: LoadHints, *, usual: Interpolation | None, source: str) -> Model:
    """Return the model for images of ``hints.resize_to``, or ``model`` if the user did not ask for another size.

    usual: the algorithm of the code that wrote the file, used if the user names no algorithm; None if not known.
    source: the name of the file, for messages.
    Errors: CheckpointError when the model has this size already, was resized before, or cannot be resized.
    """
    if hints.resize_to is None:
        return model
    spec, size = model.spec, (hints.resize_to, hints.resize_to)
    what = f"{source}: --resize-to {hints.resize_to}"
    if spec.image_shape == size:
        raise CheckpointError(
            f"{what}: the model already takes images of {size[0]} × {size[1]} pixels, so nothing would change",
            hint="leave --resize-to out",
        )
    if spec.resizing:
        raise CheckpointError(
            f"{what}: the model was already {spec.resizing}; resampling twice gives another network than resampling "
            "once",
            hint="type gmmvit export with the checkpoint of the training",
        )
    resize = family_of(spec).resized
    if resize is None:
        supported = " and ".join(family.name for family in FAMILIES if family.resized is not None)
        raise CheckpointError(
            f"{what}: only models of the family {supported} can be resized; the code base of {spec.description} models "
            "has no algorithm that resamples position embeddings and biases for another image size",
            hint=_LEAVE_OUT,
        )
    try:
        return resize(model, size, hints.interpolation or usual)
    except InputError as exc:
        raise CheckpointError(f"{what}: {exc}", hint=exc.hint) from exc
