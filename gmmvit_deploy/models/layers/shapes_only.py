"""Build modules whose tensors have shapes and data types, but no values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_FILLING = (Tensor.normal_, Tensor.uniform_, Tensor.bernoulli_, Tensor.exponential_)
_DRAWING: Mapping[str, Callable[..., Any]] = {"randn": torch.empty, "rand": torch.empty}
"""Name of a function that draws a tensor → function with the same arguments that leaves it unwritten."""
_ARITHMETIC = {
    f"{before}{name}{after}"
    for name in ("add", "sub", "mul", "pow", "div", "truediv", "mod", "remainder", "floordiv")
    for before, after in (("", ""), ("__", "__"), ("__r", "__"))
}
_ELEMENTWISE = {"neg", "__neg__", "square", "abs", "exp", "log", "sqrt", "sin", "cos"}
_TO_FLOAT = {"div", "__div__", "truediv", "__truediv__", "__rtruediv__", "__rdiv__", "exp", "log", "sqrt", "sin", "cos"}


@contextmanager
def shapes_only() -> Iterator[None]:
    """Build the modules of the block on the device ``meta``, without random numbers and without arithmetic.

    For the first random number, sum or product on this device, PyTorch imports its compiler, which takes as long as the
    import of PyTorch itself, although the device has no values. Other functions are left to PyTorch.
    """
    with torch.device("meta"), _WithoutValues():
        yield


class _WithoutValues(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if func in _FILLING and args[0].is_meta:
            return args[0]
        if name in _ARITHMETIC and not kwargs and len(args) == 2 and _are_meta(args):
            return _result_of(name, args)
        if name in _ELEMENTWISE and not kwargs and len(args) == 1 and _are_meta(args):
            return _result_of(name, args)
        if func is torch.stack and _are_meta(args[0]):
            return _stacked(*args, **kwargs)
        return _DRAWING.get(name, func)(*args, **kwargs)


def _are_meta(operands: Sequence[Any]) -> bool:
    """Return whether the operands are tensors on the device ``meta``, at least one, and numbers."""
    tensors = [operand for operand in operands if isinstance(operand, Tensor)]
    numbers = [operand for operand in operands if isinstance(operand, (int, float))]
    return bool(tensors) and len(tensors) + len(numbers) == len(operands) and all(tensor.is_meta for tensor in tensors)


def _result_of(name: str, operands: Sequence[Any]) -> Tensor:
    """Return a tensor of the shape and data type of the result, without values."""
    tensors = [operand for operand in operands if isinstance(operand, Tensor)]
    dtype = torch.result_type(*operands) if len(operands) == 2 else tensors[0].dtype
    if name in _TO_FLOAT and not dtype.is_floating_point and not dtype.is_complex:
        dtype = torch.get_default_dtype()
    return torch.empty(torch.broadcast_shapes(*(tensor.shape for tensor in tensors)), dtype=dtype, device="meta")


def _stacked(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    shape = list(tensors[0].shape)
    shape.insert(dim if dim >= 0 else dim + len(shape) + 1, len(tensors))
    return torch.empty(shape, dtype=torch.result_type(tensors[0], tensors[-1]), device="meta")
