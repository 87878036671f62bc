"""Run a file that the user named, and build the class of the file.

What the file prints goes to stderr, because stdout holds the data of a command. Every exception of the file becomes an
InputError that names the exception and the line of the file.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import traceback
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.models.families.custom.spec import OwnFile

_LONGEST_REASON = 300
_MODULES: dict[str, ModuleType] = {}  # SHA-256 → module; a file runs once in a process


def class_of_file(file: OwnFile, name: str) -> type[nn.Module]:
    """Run the file once in this process, and return its ``torch.nn.Module`` class with this name, or InputError."""
    if file.sha256 not in _MODULES:
        _MODULES[file.sha256] = _run(file)
    module = _MODULES[file.sha256]
    value = getattr(module, name, None)
    if not (inspect.isclass(value) and issubclass(value, nn.Module)):
        modules = [
            other
            for other, own in vars(module).items()
            if inspect.isclass(own) and issubclass(own, nn.Module) and own.__module__ == module.__name__
        ]
        actual = f"{name} is a {type(value).__name__}" if hasattr(module, name) else f"the file has no {name}"
        if inspect.isclass(value):
            actual = f"{name} is a class that is not derived from torch.nn.Module"
        raise InputError(
            f"{file.path}: expected a class {name} that is derived from torch.nn.Module, but {actual}",
            hint=f"type --model {file.path}:CLASS with a class of the file: {', '.join(modules)}"
            if modules
            else f"define a class in {file.path} that is derived from torch.nn.Module",
        )
    return value


def _run(file: OwnFile) -> ModuleType:
    # dataclasses and pickle look a class up in the module that defines the class, so the module must have a name.
    name = f"gmmvit_own_class_{file.sha256[:16]}"
    module = ModuleType(name)
    module.__file__ = file.path
    sys.modules[name] = module
    try:
        with errors_of_file(file, "the file cannot be run"):
            exec(compile(file.source, file.path, "exec"), module.__dict__)  # noqa: S102 - the user named this file
    except BaseException:
        del sys.modules[name]
        raise
    return module


def network_of_class(file: OwnFile, name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Build the class ``name`` of the file with these arguments, or InputError."""
    own_class = class_of_file(file, name)
    try:
        signature = inspect.signature(own_class)
    except (TypeError, ValueError):  # some classes have no signature
        signature = None
    if signature is not None:
        try:
            signature.bind(**arguments)
        except TypeError as exc:
            raise InputError(
                f"{file.path}: the class {name} does not take these arguments: {exc}; expected {name}{signature}, got "
                f"{', '.join(arguments) or 'no arguments'}",
                hint="type --model-args with the arguments of training as a JSON object, such as "
                """--model-args '{"depth": 6}'""",
            ) from exc
    with errors_of_file(file, f"the class {name} cannot be built"):
        network = own_class(**arguments)
        _separate(network)
        return network


def _separate(network: nn.Module) -> None:
    """Give each parameter and buffer memory of its own, as moving the network to a GPU does.

    Where a constructor makes a parameter a view of another, such as the transposed weight, training on a GPU gives the
    two different values, and loading them into shared memory would overwrite the first.
    """
    used: set[int] = set()
    for tensor in (*network.parameters(), *network.buffers()):
        if is_lazy(tensor):  # has no memory before the first forward pass
            continue
        memory = tensor.untyped_storage().data_ptr()
        if memory in used:
            tensor.data = tensor.data.clone()
        used.add(memory)


@contextlib.contextmanager
def errors_of_file(file: OwnFile, what: str) -> Iterator[None]:
    """Context manager: turn an exception into an InputError, and send what the file prints to stderr.

    what: the step that fails, for the message, such as ``the class ViT cannot be built``.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    # The code of the user may raise any exception, and may call sys.exit.
    except (Exception, SystemExit) as exc:
        if isinstance(exc, InputError):
            raise
        raise InputError(f"{file.path}{_line(file, exc)}: {what}: {_reason(exc)}", hint=_hint(file, exc)) from exc


def _line(file: OwnFile, exc: BaseException) -> str:
    """Return ``, line 12`` with the last line of the file that the exception passed through, or "" if none did."""
    if isinstance(exc, SyntaxError) and exc.filename == file.path and exc.lineno is not None:
        return f", line {exc.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(exc.__traceback__) if frame.filename == file.path]
    return f", line {lines[-1]}" if lines else ""


def _reason(exc: BaseException) -> str:
    first = next(iter(str(exc).strip().splitlines()), "")
    return f"{type(exc).__name__}: {first[:_LONGEST_REASON]}" if first else type(exc).__name__


def _hint(file: OwnFile, exc: BaseException) -> str:
    if isinstance(exc, ModuleNotFoundError):
        return (
            f"install {exc.name}; if {exc.name} is a file beside {file.path}, copy its code into {file.path}, or type "
            "PYTHONPATH=FOLDER before gmmvit"
        )
    return f"correct {file.path}, or type --model-args with the arguments of training"
