"""Check that a loaded model of timm computes logits, and computes what timm's own model computes."""

from __future__ import annotations

import copy

import torch

from gmmvit_deploy.errors import SpecError
from gmmvit_deploy.families.timm.model import ATTENTION, MASK, TimmModel
from gmmvit_deploy.families.timm.network import network_from_spec
from gmmvit_deploy.specs import input_shape

__all__ = ["require_equal_to_timm"]

_ROUNDING = 1e-9
"""Largest difference of the float64 logits, relative to the largest logit.  A wrong epsilon of a norm changes them by
1e-5."""


@torch.no_grad()
def require_equal_to_timm(model: TimmModel) -> None:
    """Check the logits of two random images.

    The shape must be (images, classes). For a model without masks and without a linear head, the float64 logits must
    equal those of the unchanged network that timm builds, filled with the same weights.
    Errors: SpecError when the shape or the logits differ.
    """
    spec = model.spec
    images = torch.randn(2, *input_shape(spec), generator=torch.Generator().manual_seed(0))
    if spec.mask.kind == "plain" and not spec.head_blocks:
        exact = images.double()
        logits = copy.deepcopy(model).double()(exact)
    else:
        exact, logits = None, model(images)
    shape = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
    expected_shape = (2, spec.classes or (shape[1] if len(shape) == 2 else "D"))
    if shape != expected_shape:
        what = "logits" if spec.classes else "features"
        raise SpecError(
            f"timm model {spec.architecture}: expected {what} of shape {expected_shape} for two images, got {shape}",
            hint="type --model-args with the global_pool of a classifier, such as token or avg",
        )
    if exact is None:
        return
    plain = network_from_spec(spec)
    plain.load_state_dict(
        {
            name.removeprefix("network."): tensor
            for name, tensor in model.state_dict().items()
            if f".{ATTENTION}." not in name and f".{MASK}." not in name
        },
        strict=True,
    )
    expected = plain.double()(exact)
    if not bool(expected.isfinite().all()):
        return  # `checkpoints.audit` reports weights that are NaN or infinite
    largest, scale = float((logits - expected).abs().max()), float(expected.abs().max())
    if not largest <= _ROUNDING * max(scale, 1.0):
        raise SpecError(
            f"timm model {spec.architecture}: the logits differ by {largest:.3g} from the logits of timm's own model; "
            "this is a defect of gmmvit-deploy, please report it with the name of the architecture"
        )
