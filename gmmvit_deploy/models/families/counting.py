"""Count the trainable parameters and the multiply-accumulates (MACs) of a model."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from gmmvit_deploy.models.families import model_from_spec
from gmmvit_deploy.models.specs import ModelSpec, input_shape


def trainable_parameters(model: nn.Module) -> int:
    """Return the number of elements of all parameters.  A shared parameter counts once; buffers do not count."""
    return sum(parameter.numel() for parameter in model.parameters())


def multiply_accumulates(spec: ModelSpec) -> int:
    """Return the MACs of all matrix products and convolutions for a single image.

    PyTorch's operator counter runs the model on tensors that have shapes but no data. The matrix products of attention
    are counted; norms, softmax, masks, GELU and biases are not counted.
    """
    with torch.device("meta"), torch.inference_mode():
        model = model_from_spec(spec).eval()
    # A model of a user's own class has its tensors on the CPU.
    device = next((parameter.device for parameter in model.parameters()), torch.device("meta"))
    with device, torch.inference_mode(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, *input_shape(spec)))
    return int(counter.get_total_flops()) // 2  # the counter counts a multiply-accumulate as two operations
