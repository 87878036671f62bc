"""How large a model is, without weights and without running it."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from gmmvit_deploy.families import model_from_spec
from gmmvit_deploy.specs import ModelSpec, input_shape

__all__ = ["multiply_accumulates", "trainable_parameters"]


def trainable_parameters(model: nn.Module) -> int:
    """How many numbers training adjusts: each parameter once, no buffers."""
    return sum(parameter.numel() for parameter in model.parameters())


def multiply_accumulates(spec: ModelSpec) -> int:
    """MACs of one image: matrix products and convolutions, attention's own included.

    Counted by PyTorch's operator-level counter on shapes alone. Norms, softmax, masks, GELU and
    biases are not counted.
    """
    with torch.device("meta"), torch.inference_mode():
        model = model_from_spec(spec).eval()
        with FlopCounterMode(display=False) as counter:
            model(torch.empty(1, *input_shape(spec)))
    return int(counter.get_total_flops()) // 2  # it counts a multiply-accumulate as two
