"""Check that a model computes the outputs that export writes, and describe the outputs for the manifest."""

from __future__ import annotations

import torch

from gmmvit_deploy.bundle.artifacts import MEANINGS, OutputRecord
from gmmvit_deploy.bundle.golden import GoldenSet
from gmmvit_deploy.checkpoints.loading import LoadedCheckpoint
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.models.specs import input_shape

__all__ = ["output_records", "require_outputs"]


@torch.no_grad()
def require_outputs(loaded: LoadedCheckpoint) -> None:
    """Check that the model computes its outputs for an image.

    Errors: InputError when the network does not have the features, has two classifier heads, or when the features of an
    image are not a vector.
    """
    model, spec = loaded.model, loaded.spec
    if "logits" in model.outputs and not spec.classes:
        raise InputError(
            f"{loaded.file.path}: the network has no classifier, so that it has no logits",
            hint="add --outputs features",
        )
    if model.outputs == ("logits",):
        return
    heads = [name for name, _ in model.classifier_heads()]
    if len(heads) > 1:
        raise InputError(
            f"{loaded.file.path}: --outputs {','.join(model.outputs)}: the network is distilled: {' and '.join(heads)} "
            "read different tokens, so that no single vector is the features",
            hint="leave --outputs out to export the logits",
        )
    why = ""
    try:
        for name, answer in zip(model.outputs, model.answers(torch.zeros(1, *input_shape(spec))), strict=True):
            if answer.ndim != 2:
                why = f"the {name} of an image have the shape {tuple(answer.shape[1:])}, not that of a vector"
    # The network can be code of another package, which raises exceptions of any class.
    except Exception as exc:
        why = str(exc).strip() or type(exc).__name__
    if why:
        raise InputError(
            f"{loaded.file.path}: --outputs {','.join(model.outputs)}: {why}",
            hint="leave --outputs out to export the logits; for a model of timm, type --model-args with the "
            "global_pool of a classifier, such as token or avg",
        )


def output_records(golden: GoldenSet) -> tuple[OutputRecord, ...]:
    """Return the outputs of a bundle, whose widths the golden answers show."""
    widths = {golden.output: golden.logits.shape[1]}
    if golden.features is not None:
        widths["features"] = golden.features.shape[1]
    return tuple(OutputRecord(name=name, shape=(width,), meaning=MEANINGS[name]) for name, width in widths.items())
