"""Replace methods of a module of another package by changing the class of the module to a subclass.

The subclass is made when it is needed. Copies (``copy.deepcopy``) and pickled modules keep the subclass, because an
object of the subclass pickles as the original class and the function that makes the methods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeAlias

from torch import nn

Methods: TypeAlias = Callable[..., Mapping[str, Any]]
"""Function (original class, further arguments) → name of a method → function.  Defined at the level of a module."""


def replace_methods(module: nn.Module, methods: Methods, *arguments: str) -> None:
    """Change the class of ``module`` to a subclass with the methods that ``methods`` returns.

    arguments: the further arguments of ``methods``.  ``isinstance`` with the original class still holds.
    """
    original: Any = type(module)
    module.__class__ = _subclass(original, methods, arguments)


@cache  # so that two copies of a module have the same class
def _subclass(original: type, methods: Methods, arguments: tuple[str, ...]) -> type:
    def reduce(self: Any, protocol: Any) -> Any:
        return _restored, (original, methods, arguments), self.__dict__

    name = f"{original.__name__}With{methods.__name__.title().replace('_', '')}"
    return type(name, (original,), {**methods(original, *arguments), "__reduce_ex__": reduce})


def _restored(original: type, methods: Methods, arguments: tuple[str, ...]) -> Any:
    subclass: Any = _subclass(original, methods, arguments)
    return subclass.__new__(subclass)
