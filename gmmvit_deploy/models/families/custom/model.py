"""A module of the user's own class, as a model of this package: run its file, build the class, answer its attentions.

What the file prints goes to stderr, because stdout holds the data of a command. Every exception of the file becomes an
InputError that names the exception and the line of the file.

If an attention of the user's class calls PyTorch's fused attention function once, without ``attn_mask``, an
`AnsweredAttention` computes the result in place of this function. The graph then has the form that the kernels and
the engines recognise: matrix product, scale, softmax, matrix product.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
import traceback
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.models.families.custom import CustomSpec, OwnFile, permitted_file
from gmmvit_deploy.models.layers.fused_call import AnsweredAttention, FusedCall, answer_fused_call, single_calls
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.layers.token_grids import TokenGrids, token_grids, unknown_grids
from gmmvit_deploy.models.scores.attention import AttentionScores
from gmmvit_deploy.models.scores.scales import Scale
from gmmvit_deploy.models.specs import input_shape

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
    module.__file__, module.__package__ = file.path, file.package
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


_ANSWER = "answered_attention"  # the name of the submodule that answers the fused attention function
_BATCH = 2


class CustomModel(Model):
    """Images (B, c, S, S), normalised, float32 → logits (B, C), by a module of the user's own class."""

    foreign: ClassVar[bool] = True
    spec: CustomSpec

    def __init__(self, spec: CustomSpec, network: nn.Module) -> None:
        super().__init__()
        self.spec = spec
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.network(images)
        return logits

    def observed_grids(self) -> TokenGrids:
        """Build the user's class again, and run the network without data: this network calls the fused function."""
        file = permitted_file(self.spec)
        network = network_of_class(file, self.spec.class_name, self.spec.model_args)
        try:
            with errors_of_file(file, "the network cannot run without data"):
                return token_grids(network, input_shape(self.spec), only_this_shape=True)
        except InputError as exc:
            return unknown_grids(network, str(exc))


def build(spec: CustomSpec) -> CustomModel:
    """Build the user's class.  Errors: InputError when it cannot be built, or `permit` was not called for the file.

    The class is built on the CPU even under ``torch.device("meta")``, because a constructor may read values of tensors.
    """
    file = permitted_file(spec)
    with torch.device("cpu"):
        network = network_of_class(file, spec.class_name, spec.model_args)
        for call in _answerable_calls(file, network, input_shape(spec)):
            answer = AnsweredAttention(AttentionScores({"scale": Scale(call.scale)}))
            answer_fused_call(network.get_submodule(call.module), _ANSWER, answer)
        return CustomModel(spec, network)


def _answerable_calls(file: OwnFile, network: nn.Module, shape: tuple[int, int, int]) -> list[FusedCall]:
    """Return the calls that can be answered: calls without ``attn_mask``, in modules that make a single call.

    The exporter decomposes every other call. No call is answered if the network cannot run on tensors without data.
    """
    try:
        with errors_of_file(file, "the network cannot run without data"):
            calls = single_calls(network, shape)
    except InputError:
        return []
    return [call for call in calls if call.bias is None and not hasattr(network.get_submodule(call.module), _ANSWER)]


def classes_of(file: OwnFile, name: str, network: nn.Module, shape: tuple[int, int, int]) -> int:
    """Return C, the number of classes, from the logits of two random images, also in float64, which parity needs.

    Errors: InputError when the class raises an exception, when the output is not a tensor (2, C) of logits, or when the
    logits of an image depend on the other image.
    """
    height, width = shape[1:]
    what = f"the class {name} cannot compute the logits of images of {shape[0]} × {height} × {width}"
    images = torch.randn(_BATCH, *shape, generator=torch.Generator().manual_seed(0))
    network = network.eval()
    with torch.inference_mode(), errors_of_file(file, what):
        output = network(images)
    if (problem := _problem(output)) is not None:
        raise InputError(
            f"{file.path}: expected the class {name} to output logits, a float32 tensor of shape (batch, classes), "
            f"got {problem}",
            hint=f"write a class in {file.path} whose forward returns only the logits, and name this class in --model",
        )
    what = f"the class {name} cannot compute float64 logits, which gmmvit parity needs as the reference"
    with torch.inference_mode(), errors_of_file(file, what):
        exact = copy.deepcopy(network).double()
        together, alone = exact(images.double()), exact(images[:1].double())
    if alone.shape != together[:1].shape or not torch.allclose(alone, together[:1], rtol=1e-6, atol=1e-9):
        raise InputError(
            f"{file.path}: in the class {name}, the logits of an image depend on the other images of the batch",
            hint=f"write a class in {file.path} that computes the logits of each image from this image only",
        )
    return int(output.shape[1])


def _problem(output: object) -> str | None:
    """Return what is wrong with the output of a batch of two images, or None if the output is a tensor (2, C)."""
    if not isinstance(output, Tensor):
        count = f" of {len(output)} values" if isinstance(output, tuple | list | dict) else ""
        return f"a {type(output).__name__}{count}"
    shape = tuple(output.shape)
    if output.ndim != 2 or shape[0] != _BATCH or shape[1] < 1:
        return f"a tensor of shape {shape} for a batch of {_BATCH} images"
    if output.dtype != torch.float32:
        return f"a tensor of {output.dtype}"
    if bool((output >= 0).all()) and torch.allclose(output.sum(1), torch.ones(_BATCH), rtol=0, atol=1e-4):
        return "probabilities, because the class ends in a softmax"
    return None
