"""Random weights for which every attention of a network matters.

A new model of timm is a poor test: its biases are zero, its LayerScale is almost zero, and its attention weights are
almost equal for all tokens. `perturbed` draws all weights anew. `attention_effects` measures how far the logits move
when the weights of a single attention are made equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_SOFTMAX = (torch.softmax, Tensor.softmax, F.softmax)


@torch.no_grad()
def perturbed(network: nn.Module, gain: float = 1.0) -> nn.Module:
    """Draw all parameters and statistics of a network anew, such that the attention weights are uneven.

    matrices, convolutions       normal, with the variance gain² / (number of inputs)
    weights of norms             normal around 1, with the deviation 0.2
    LayerScale                   normal around 0.5, with the deviation 0.1
    CaiT's bias after softmax    normal, with the deviation 0.0005: the bias adds to every attention weight
    tables, tokens, positions    normal, with the deviation 0.5
    other parameters             the initial value, plus normal noise with the deviation 0.1
    statistics of BatchNorm      means as other parameters, variances uniform in [0.5, 1.5]
    """
    for name, parameter in network.named_parameters():
        noise = torch.randn_like(parameter)
        last = name.rpartition(".")[2]
        if (last.endswith("weight") and parameter.dim() > 1) or last in ("in_proj_weight", "qkv"):
            parameter.copy_(gain * noise / math.sqrt(parameter[0].numel()))
        elif last == "weight":
            parameter.copy_(1 + 0.2 * noise)
        elif last.startswith("gamma"):
            parameter.copy_(0.5 + 0.1 * noise)
        elif name.endswith("proj_w.bias"):
            parameter.copy_(0.0005 * noise)
        elif parameter.dim() > 1 and parameter.numel() > parameter.shape[0]:
            parameter.copy_(0.5 * noise)
        else:
            parameter.add_(0.1 * noise)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d | nn.BatchNorm1d):
            module.running_mean.add_(0.1 * torch.randn_like(module.running_mean))
            module.running_var.uniform_(0.5, 1.5)
    return network


@torch.inference_mode()
def attention_effects(model: nn.Module, images: Tensor) -> list[float]:
    """Return for each softmax of a model how far the logits move when all outputs of the softmax are equal.

    Equal attention weights remove the attention: each token then receives the mean of V over all tokens.
    The result is empty for a model without attention. A softmax of the attention's relative position, as in ConViT, is
    an entry of its own.
    """
    with _softmaxes_replaced(None) as count:
        logits = model(images)
    effects = []
    for index in range(len(count)):
        with _softmaxes_replaced(index):
            effects.append(float((model(images) - logits).abs().max()))
    return effects


@contextmanager
def _softmaxes_replaced(index: int | None) -> Iterator[list[int]]:
    """Make the outputs of softmax number ``index`` equal; yield a list that grows by an element for each softmax."""
    calls: list[int] = []

    class Replacing(TorchFunctionMode):
        def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            out = func(*args, **kwargs)
            if func in _SOFTMAX:
                if len(calls) == index:
                    out = torch.full_like(out, 1 / out.shape[kwargs.get("dim", args[1] if len(args) > 1 else -1)])
                calls.append(len(calls))
            return out

    with Replacing():
        yield calls
