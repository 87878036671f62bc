"""Compute with the weights of a model in float64, without a copy of the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

__all__ = ["in_float64"]


@contextmanager
@torch.no_grad()
def in_float64(model: nn.Module) -> Iterator[None]:
    """Convert the floating-point tensors of a model to float64 while the block runs, and back at its end.

    float64 has every value of float32, so the model gets the same bits back. A copy in float64 would need the memory of
    the weights three times.
    """
    types = {name: tensor.dtype for name, tensor in _tensors(model)}
    model.double()
    try:
        yield
    finally:
        for name, tensor in _tensors(model):
            tensor.data = tensor.data.to(types[name])


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
