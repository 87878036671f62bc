"""Put masks on the attention scores of a model that timm builds, for training.

    from gmmvit_deploy.timm import create
    model = create("vit_tiny_patch16_224", mask="gmm", global_pool="avg", class_token=False, num_classes=10)

    gmm, elm:  softmax(M ∘ (Q Kᵀ · scale) + attn_mask) V
    decay:     softmax(Q Kᵀ · scale + D + attn_mask) V,    D[h,i,j] = (|Δrow| + |Δcolumn|) · log γ_h

The entries of a Gaussian mixture and of D depend on the distance between two tokens on the grid of patches or of a
window. The rows and columns of prefix tokens, such as a class token, are not masked. The code of timm's attention
classes does not change: in each attention, a submodule ``mask`` computes the result in place of PyTorch's fused
attention function (`layers.masked_attention.MaskedAttention`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any, Literal, TypeVar, get_args

from torch import nn

from gmmvit_deploy.errors import MissingDependencyError, SpecError
from gmmvit_deploy.models.layers.fused_call import AnsweredAttention, answer_fused_call
from gmmvit_deploy.models.layers.masked_attention import MaskedAttention
from gmmvit_deploy.models.layers.token_grids import Placement, TokenGrids, require_placements, token_grids
from gmmvit_deploy.models.scores.biases import PassedBias
from gmmvit_deploy.models.specs import MaskSpec

__all__ = ["MaskForm", "TrainedMask", "add_masks", "create"]

TrainedMask = Literal["gmm", "elm", "decay"]
MaskForm = Literal["closed", "stored"]
_Network = TypeVar("_Network", bound=nn.Module)

_NAME = "mask"  # the submodule of each attention, so the state dict has keys such as blocks.0.attn.mask.alpha
_LARGE = 256 * 1024**2  # bytes of masks from which `add_masks` warns


def create(
    name: str,
    *,
    mask: TrainedMask = "gmm",
    kernels: int = 5,
    shared: bool = False,
    form: MaskForm = "closed",
    **model_args: Any,
) -> nn.Module:
    """Build a model with ``timm.create_model(name, **model_args)``, and put masks on its attention scores.

    mask, kernels, shared, form: as ``kind``, ``kernels``, ``shared``, ``form`` of `add_masks`.
    model_args: the arguments of ``timm.create_model``, for example ``img_size``, ``num_classes``, ``global_pool``.
    Errors:
        MissingDependencyError: timm is not installed.
        SpecError: as for `add_masks`.
    """
    try:
        import timm
    except ImportError as exc:
        raise MissingDependencyError("timm, which builds this model,", extra="timm") from exc
    model: nn.Module = timm.create_model(name, **model_args)
    shape = _image_shape(model, model_args.get("img_size"))
    _mask(model, _mask_spec(mask, kernels, shared, form), shape)
    return model


def add_masks(
    model: _Network,
    *,
    kind: TrainedMask = "gmm",
    kernels: int = 5,
    shared: bool = False,
    form: MaskForm = "closed",
    image_shape: tuple[int, int, int] | None = None,
) -> _Network:
    """Put a mask on the scores of every attention between the tokens of ``model``, and return ``model``.

    kind: ``gmm``, a Gaussian mixture mask; ``elm``, an elementwise learnable mask; ``decay``, the Manhattan decay of
    the architecture RMT, a bias that is not trained: γ_h = 1 − 2^(−2 − 4·h/H) for the head h = 0 … H−1.
    kernels: K, the number of Gaussians of a mixture; only for ``gmm``.
    shared: True if all heads share the mixture; only for ``gmm``.
    form: ``closed`` computes a Gaussian mixture from the distances of the tokens; ``stored`` computes the mixture from
    a stored float32 base, as the paper authors' code does. In the base, the entries of distant tokens have underflowed
    to zero, so their entries in the mask are zero, whatever alpha and sigma are. Only for ``gmm``.
    image_shape: (channels, height, width) of the images. With None, the size is read from the model.

    Attention pooling and class attention, with a single query, are not masked. The initial values are those of
    `scores.masks.mask_from_spec`: Gaussians with alpha near 1/K and sigma from 1 to the longer side of the grid; an
    elementwise mask near 1. timm's optimizer factory applies weight decay to alpha, sigma and elementwise masks,
    because these tensors have more than one dimension. The paper authors' training code also applies weight decay to
    these tensors.

    Warns when the last mask has no effect, because the head reads only prefix tokens, and when the masks take 256 MiB
    or more.
    Errors: SpecError when an attention between tokens cannot take a mask, with a reason for each class of attention;
    when the model has masks already; when an option does not fit the kind of the mask; when the size of the images is
    not known; when the model cannot run on images of this size.
    """
    _mask(model, _mask_spec(kind, kernels, shared, form), image_shape or _image_shape(model, None))
    return model


def _mask(model: nn.Module, spec: MaskSpec, shape: tuple[int, int, int]) -> None:
    if any(isinstance(module, AnsweredAttention) for module in model.modules()):
        raise SpecError(
            f"{type(model).__name__}: expected a model without masks, got a model whose attentions gmmvit_deploy has "
            "changed already, for example with add_masks"
        )
    grids = _dry_run(model, shape)
    places = require_placements(model, grids)
    answers = {place.module: _answer(model, place, spec, shape) for place in places}
    for path, answer in answers.items():
        attention = model.get_submodule(path)
        if hasattr(attention, "fused_attn"):
            attention.fused_attn = True  # type: ignore[assignment]  # nn.Module types every attribute as a tensor
        answer_fused_call(attention, _NAME, answer)
    for text in (*_ineffective_mask(model, grids), *_large_masks(places, spec)):
        warnings.warn(text, stacklevel=3)  # the line that calls `create` or `add_masks`


def _mask_spec(kind: str, kernels: int, shared: bool, form: str) -> MaskSpec:
    for option, value, known in (("mask kind", kind, get_args(TrainedMask)), ("form", form, get_args(MaskForm))):
        if value not in known:
            raise SpecError(f"{option}: expected one of {', '.join(known)}, got {value!r}")
    mixture = kind == "gmm"
    return MaskSpec(
        kind=kind,  # type: ignore[arg-type]  # checked above
        kernels=kernels if mixture else 0,
        shared=shared,
        closed_form=mixture and form == "closed",
    )


def _answer(model: nn.Module, place: Placement, spec: MaskSpec, shape: tuple[int, int, int]) -> MaskedAttention:
    bias = None if place.call.bias is None else PassedBias(model, shape)
    answer = MaskedAttention(place, spec, bias)
    like = next(model.get_submodule(place.module).parameters(), None)
    answer.train(model.training)
    return answer if like is None else answer.to(device=like.device, dtype=like.dtype)


def _dry_run(model: nn.Module, shape: tuple[int, int, int]) -> TokenGrids:
    try:
        return token_grids(model, shape)
    except SpecError:
        raise
    # The code of the model raises errors of any class for images of a wrong size.
    except Exception as exc:
        size = " × ".join(map(str, shape))
        raise SpecError(
            f"{type(model).__name__}: the forward pass of images of the shape {size} failed with "
            f"{type(exc).__name__}: {exc}",
            hint="pass the size of the training images: img_size=… to create, or image_shape=(channels, height, width) "
            "to add_masks",
        ) from exc


def _image_shape(model: nn.Module, img_size: int | Iterable[int] | None) -> tuple[int, int, int]:
    """Return (channels, height, width), as the caller or else the model states them.  Errors: SpecError."""
    size: Any = img_size or getattr(getattr(model, "patch_embed", None), "img_size", None)
    if size is None:
        size = (getattr(model, "pretrained_cfg", None) or {}).get("input_size", (0, 0, 0))[1:]
    height, width = (size, size) if isinstance(size, int) else tuple(size)
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    if not height or first is None:
        raise SpecError(
            f"{type(model).__name__}: the model does not state the shape of its images",
            hint="pass img_size=… to create, or image_shape=(channels, height, width) to add_masks",
        )
    return first.in_channels, int(height), int(width)


def _ineffective_mask(model: nn.Module, grids: TokenGrids) -> Iterator[str]:
    """Yield a warning if the head reads only prefix tokens: the last mask has ones in the rows of these tokens."""
    last = grids.placements[-1]
    # An attention pooling, or a class attention, after the last mask reads all tokens.
    if last.prefix and not grids.poolings and getattr(model, "global_pool", None) == "token":
        yield (
            f"the mask of {last.module} has no effect and gets no gradient, because the head reads only the class "
            "token, whose row is not masked; to use this mask, build the model with global_pool='avg', if its class "
            "supports this value"
        )


def _large_masks(places: tuple[Placement, ...], spec: MaskSpec) -> Iterator[str]:
    """Yield a warning if the masks of an exported model, which are float32 constants, are large."""
    one_for_all = spec.shared or spec.kind == "elm"
    size = sum(4 * place.tokens**2 * (1 if one_for_all else place.heads) for place in places)
    if size >= _LARGE:
        largest = max(places, key=lambda place: place.tokens)
        advice = (
            "; shared=True divides the size by the number of heads" if spec.kind == "gmm" and not spec.shared else ""
        )
        yield (
            f"the masks take {size / 1024**2:.0f} MiB in an exported model; the largest mask, in {largest.module}, has "
            f"{largest.tokens} × {largest.tokens} entries{advice}"
        )
