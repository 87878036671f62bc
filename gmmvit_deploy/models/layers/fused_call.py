"""Replace the calls of PyTorch's fused attention function by calls of a module of this package.

    F.scaled_dot_product_attention(Q, K, V, attn_mask)   →   softmax(before(Q Kᵀ) + attn_mask) V

`answer_fused_call` makes an attention module call a submodule in place of the function: the submodule *answers* the
call. The code of the module does not change, so this works for the attentions of timm and of hand-written networks, but
not inside ``torch.nn.MultiheadAttention``, where another function of PyTorch makes the call. `dry_run` lists the calls
of a network.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812 - its common name
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gmmvit_deploy.errors import SpecError
from gmmvit_deploy.inference.precision import Role
from gmmvit_deploy.models.scores.attention import AttentionScores
from gmmvit_deploy.models.scores.biases import PassedBias

Methods: TypeAlias = Callable[..., Mapping[str, Any]]
"""Function (original class, further arguments) → name of a method → function.  Defined at the level of a module."""


def replace_methods(module: nn.Module, methods: Methods, *arguments: str) -> None:
    """Change the class of ``module``, of another package, to a subclass with the methods that ``methods`` returns.

    Copies and pickled modules keep the subclass: it pickles as the original class, ``methods`` and its ``arguments``.
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


Answer = Callable[..., Tensor]
DRY_IMAGES = 2
"""The batch size of a `dry_run`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedCall:
    """A call of the fused attention function in a forward pass of a network.

    module: the path of the module that calls the function.  query, key: the shapes of Q and K.
    bias: the shape of the call's ``attn_mask``, or None.  scale: the factor of Q Kᵀ.
    """

    module: str
    query: tuple[int, ...]
    key: tuple[int, ...]
    bias: tuple[int, ...] | None
    scale: float

    @property
    def windows(self) -> int | None:
        """The number of windows of an image if the call's ``attn_mask`` differs between windows, else None."""
        leading = self.bias[0] if self.bias is not None and len(self.bias) == 4 else 1
        return leading // DRY_IMAGES if leading > 1 else None


@dataclass(frozen=True, slots=True)
class _Arguments:
    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def require_supported(self, where: str) -> None:
        if self.is_causal or self.enable_gqa:
            option = "is_causal" if self.is_causal else "enable_gqa"
            raise SpecError(f"{where} calls F.scaled_dot_product_attention with {option}=True, which is not supported")


class _Answering(TorchFunctionMode):
    """While this mode is active, ``answer`` computes the result of the fused attention function."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.answer = answer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self.answer(_Arguments(*args, **kwargs))
        return func(*args, **kwargs)


class AnsweredAttention(nn.Module):
    """Compute after(softmax(before(Q Kᵀ))) V for a call of the fused attention function.

    scores: a step `PassedBias` adds the call's ``attn_mask``.
    windows: the number of windows in an image if ``attn_mask`` differs between them, else None.
    """

    operator_roles: ClassVar[Mapping[str, Role]] = {"softmax": "softmax", "matmul": "product"}

    def __init__(self, scores: AttentionScores, *, windows: int | None = None) -> None:
        super().__init__()
        self.scores = scores
        self.windows = windows

    def forward(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout: float = 0.0) -> Tensor:
        """Return the attention's output, in the shape of Q: (batch [· windows], heads, tokens, head dim)."""
        if self.windows is not None:
            query, key, value = (part.unflatten(0, (-1, self.windows)) for part in (query, key, value))
            bias = None if bias is None else bias.unflatten(0, (-1, self.windows))
        for _, step in self.scores.steps_before():
            if isinstance(step, PassedBias):
                step.passed = bias
        weights = self.scores.weights(query, key)
        if dropout:
            weights = F.dropout(weights, dropout)
        out = weights @ value
        return out if self.windows is None else out.flatten(0, 1)


def answer_fused_call(attention: nn.Module, name: str, answer: nn.Module) -> None:
    """Make ``attention``, which calls the fused attention function once, call its new submodule ``answer`` instead.

    answer: a module with the signature of `AnsweredAttention.forward`.
    """
    attention.add_module(name, answer)
    replace_methods(attention, answered_forward, name)


def answered_forward(original: type, name: str) -> dict[str, Any]:
    """Return a forward in which the submodule ``name`` answers the fused attention function."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        submodule = getattr(self, name)
        calls: list[str] = []  # a list, because torch.compile traces no attributes of the mode

        def respond(call: _Arguments) -> Tensor:
            calls.append(name)
            call.require_supported(original.__name__)
            bias = call.attn_mask
            if bias is not None and bias.dtype == torch.bool:
                bias = torch.zeros_like(bias, dtype=call.query.dtype).masked_fill(~bias, float("-inf"))
            out: Tensor = submodule(call.query, call.key, call.value, bias, call.dropout_p)
            return out

        with _Answering(respond):
            out = original.forward(self, *args, **kwargs)  # type: ignore[attr-defined]  # a subclass of nn.Module
        if len(calls) != 1:
            raise SpecError(
                f"{original.__name__}: expected one call of the fused attention function, got {len(calls)} calls"
            )
        return out

    return {"forward": forward}


def use_fused_calls(network: nn.Module) -> None:
    """Make every attention module of timm in ``network`` call the fused attention function."""
    for module in network.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = True  # type: ignore[assignment]  # nn.Module types every attribute as tensor or module


def single_calls(network: nn.Module, image_shape: tuple[int, int, int]) -> list[FusedCall]:
    """Return the calls of the fused attention function in a `dry_run`, of modules that make a single call."""
    calls = dry_run(network, image_shape).calls
    times = Counter(call.module for call in calls)
    return [call for call in calls if times[call.module] == 1]


@dataclass(frozen=True, slots=True)
class DryRun:
    """The shapes of a forward pass, in the order of the pass.

    inputs: path of a module → the shape of its first tensor.
    maps: (height, width) of every feature map that a convolution or a pooling returned.
    softmaxes: (path of the module, shape) of every softmax over the last dimension.
    """

    calls: list[FusedCall] = field(default_factory=list)
    inputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    maps: list[tuple[int, int]] = field(default_factory=list)
    softmaxes: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)


@torch.no_grad()
def dry_run(network: nn.Module, image_shape: tuple[int, int, int]) -> DryRun:
    """Run a copy of ``network`` on two images on PyTorch's meta device, which computes shapes and no values.

    Errors: SpecError when an attention calls the fused attention function with ``is_causal`` or ``enable_gqa``.
    """
    shapes_only = copy.deepcopy(network).to("meta").eval()
    run = DryRun()
    running: list[str] = []  # the paths of the modules that are running; the last path is the innermost module
    for path, module in shapes_only.named_modules():
        _track(module, path, running, run)
    with _Noting(run, running, type(network).__name__):
        shapes_only(torch.empty(DRY_IMAGES, *image_shape, device="meta"))
    return run


def _track(module: nn.Module, path: str, running: list[str], run: DryRun) -> None:
    def enter(_module: nn.Module, args: Any) -> None:
        running.append(path)
        if args and isinstance(args[0], Tensor):
            run.inputs[path] = tuple(args[0].shape)

    def leave(module: nn.Module, _args: Any, out: Any) -> None:
        running.pop()
        pools = type(module).__module__ == nn.AvgPool2d.__module__
        if isinstance(out, Tensor) and out.dim() == 4 and (isinstance(module, nn.Conv2d) or pools):
            size = (out.shape[2], out.shape[3])
            if size not in run.maps:
                run.maps.append(size)

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave)


class _Noting(TorchFunctionMode):
    """While this mode is active, note every attention and softmax."""

    def __init__(self, run: DryRun, running: list[str], network: str) -> None:
        super().__init__()
        self.run, self.running, self.network = run, running, network

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        where = self.running[-1] if self.running else ""
        if func is F.scaled_dot_product_attention:
            call = _Arguments(*args, **kwargs)
            call.require_supported(where or self.network)
            self.run.calls.append(
                FusedCall(
                    module=where,
                    query=tuple(call.query.shape),
                    key=tuple(call.key.shape),
                    bias=None if call.attn_mask is None else tuple(call.attn_mask.shape),
                    scale=call.scale if call.scale is not None else call.query.shape[-1] ** -0.5,
                )
            )
            return call.query.new_empty(*call.query.shape[:-1], call.value.shape[-1])
        out = func(*args, **kwargs)
        if func in (F.softmax, torch.softmax, Tensor.softmax) and isinstance(out, Tensor):
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            if dim in (-1, out.dim() - 1):
                self.run.softmaxes.append((where, tuple(out.shape)))
        return out
