"""Build a model of timm again for another image size, and resample the tensors that depend on the size.

    pos_embed                     resampled on the new grid of patches (`layers.positions`), without the prefix tokens
    relative_position_bias_table  resampled for the new window (`layers.positions`), always by timm's function
    masks                         kept if all windows keep their size; else computed again on the new grid (closed-form
                                  Gaussian mixture, Manhattan decay) or refused (stored base, elementwise mask)
    all other tensors             unchanged; a tensor whose shape depends on the image size is refused

Masks measure distances in tokens. With the same sigma on a larger grid, a Gaussian covers as many tokens as before: the
same number of pixels, but a smaller part of the image. The model was not trained with the new grid, so only accuracy on
data shows whether the model still works.

timm builds the network for the new size with the arguments of training, except ``img_size``. timm therefore also
determines the size of the windows. The windows of BEiT are the grid of patches, and grow with the image. The windows of
Swin keep their size, with an exception: where the feature map has fewer rows or columns than ``window_size``, timm
reduces the window to the map.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gmmvit_deploy.errors import InputError, SpecError
from gmmvit_deploy.models.families.timm.network import network_from_spec
from gmmvit_deploy.models.families.timm.spec import TimmSpec
from gmmvit_deploy.models.layers.positions import Grid, resample_bias_table, resample_positions
from gmmvit_deploy.models.layers.token_grids import placements
from gmmvit_deploy.models.specs import INTERPOLATIONS, Interpolation, input_shape

if TYPE_CHECKING:
    from torch import Tensor

    from gmmvit_deploy.models.families.timm.model import TimmModel


_LEAVE_OUT = "leave --resize-to out; gmmvit then exports the model at the image size of the training"
_STORED = (
    "the file stores the base mask of the training grid, whose small entries have underflowed to zero; a base mask of "
    "another grid would be another network"
)
_ELEMENTWISE = (
    "an elementwise learnable mask (ELM) has a trained weight for each pair of tokens of the training grid, and no "
    "rule gives the weights of another grid"
)


@torch.no_grad()
def resized_model(model: TimmModel, size: tuple[int, int], interpolation: Interpolation | None) -> TimmModel:
    """Return the model for images of another size, in evaluation mode.  ``model`` does not change.

    size: (height, width) in pixels.
    interpolation: the algorithm for position embeddings; None if it is not known, for a model without them.
    The spec of the result records the old size, and the algorithm if position embeddings were resampled.
    Errors: InputError for a mask, a position embedding or another tensor that no rule gives at this size, and for
    patches that do not cover the images; SpecError when timm cannot build or run the network at this size.
    """
    spec = _spec_at(model.spec, size)
    _check_mask(model.spec, spec)
    _check_patches(model.network, size, old_size=model.spec.image_shape)
    resized = _built(spec)
    resampling = _Resampling(model.network, resized.network, interpolation)
    old, new = model.state_dict(), resized.state_dict()
    if differing := sorted(old.keys() ^ new.keys()):
        raise InputError(f"the network of timm at the new size has other tensors than the file: {differing[0]}")
    resized.load_state_dict({name: resampling.tensor(name, old[name], new[name]) for name in old}, strict=True)
    resized.spec = replace(spec, interpolation=interpolation if resampling.used else None)
    return resized.eval().requires_grad_(True)


def _spec_at(spec: TimmSpec, size: tuple[int, int]) -> TimmSpec:
    height, width = size
    model_args = dict(spec.model_args)
    # Without this argument, timm builds the same network for every size.
    if "img_size" in model_args:
        model_args["img_size"] = [height, width]
    return replace(
        spec,
        model_args=model_args,
        image_size=height,
        image_width=None if width == height else width,
        resized_from=spec.image_shape,
    )


def _check_mask(old: TimmSpec, new: TimmSpec) -> None:
    """Refuse a mask that belongs to the grid of training, unless the grids, such as windows, keep their size."""
    mask = old.mask
    no_rule = mask.kind == "elm" or (mask.kind == "gmm" and not mask.closed_form)
    if no_rule and _mask_grids(old) != _mask_grids(new):
        why = _ELEMENTWISE if mask.kind == "elm" else _STORED
        raise InputError(f"the mask cannot be used at another image size: {why}", hint=_LEAVE_OUT)


def _mask_grids(spec: TimmSpec) -> dict[str, tuple[Grid, int]]:
    """Return name of an attention → (grid of its tokens, number of prefix tokens)."""
    with torch.device("meta"):
        network = network_from_spec(spec)
    return {place.module: (place.grid, place.prefix) for place in placements(network, input_shape(spec))}


def _built(spec: TimmSpec) -> TimmModel:
    from gmmvit_deploy.models.families.timm.model import TimmModel

    try:
        return TimmModel(spec)
    except InputError as exc:
        exc.hint = _LEAVE_OUT
        raise
    # The dry run of the network raises any exception if the network does not take images of this size.
    except Exception as exc:
        raise SpecError(
            f"timm model {spec.architecture} does not take images of {_words(spec.image_shape)} pixels: "
            f"{type(exc).__name__}: {exc}",
            hint=_LEAVE_OUT,
        ) from exc


def _check_patches(network: nn.Module, size: tuple[int, int], *, old_size: tuple[int, int]) -> None:
    """Check that the patches cover the whole image."""
    embedding = getattr(network, "patch_embed", None)
    convolution = getattr(embedding, "proj", None)
    if not isinstance(convolution, nn.Conv2d) or getattr(embedding, "dynamic_img_pad", False):
        return
    patch = convolution.kernel_size
    if convolution.stride == patch and any(side % length for side, length in zip(size, patch, strict=True)):
        step = math.lcm(*patch)
        lower = size[0] // step * step
        sides = [side for side in (lower, lower + step) if side and (side, side) != old_size]
        raise InputError(
            f"images of {_words(size)} pixels cannot be divided into patches of {_words(patch)} pixels",
            hint=f"type --resize-to {' or '.join(map(str, sides))}",
        )


class _Resampling:
    """Convert tensors of a network of timm into those of the same network for another image size.

    used: True after position embeddings were resampled.
    """

    def __init__(self, old: nn.Module, new: nn.Module, interpolation: Interpolation | None) -> None:
        self._old, self._new, self._interpolation = old, new, interpolation
        self.used = False

    def tensor(self, name: str, tensor: Tensor, like: Tensor) -> Tensor:
        """Return the tensor ``name`` of `TimmModel` for the new size.  like: a tensor of the expected shape."""
        path, _, last = name.removeprefix("network.").rpartition(".")
        result = None
        if last == "pos_embed" and name.startswith("network."):
            result = self._positions(path, tensor, like)
        elif last == "relative_position_bias_table":
            result = self._bias_table(path, tensor)
        result = tensor if result is None else result.to(tensor.dtype)
        if result.shape != like.shape:
            raise InputError(
                f"the tensor {name} has the shape {_words(tensor.shape)}, expected {_words(like.shape)} at the new "
                "image size, and no rule resamples this tensor",
                hint=_LEAVE_OUT,
            )
        return result

    def _positions(self, path: str, tensor: Tensor, like: Tensor) -> Tensor | None:
        """Return the resampled position embeddings, or None if the grid of patches is unknown or does not change."""
        grids = (_patch_grid(self._old.get_submodule(path)), _patch_grid(self._new.get_submodule(path)))
        old, new = grids
        if old is None or new is None or old == new:
            return None
        if tensor.dim() == 4 and tuple(tensor.shape[2:]) == old and tuple(like.shape[2:]) == new:
            # PiT stores (1, D, rows, columns).
            flat = self._resampled(tensor.flatten(2).transpose(1, 2), old, new, prefix=0)
            lattice: Tensor = flat.transpose(1, 2).unflatten(2, new)
            return lattice
        prefix = tensor.shape[1] - math.prod(old)
        if tensor.dim() != 3 or prefix < 0 or prefix != like.shape[1] - math.prod(new):
            return None
        return self._resampled(tensor, old, new, prefix=prefix)

    def _resampled(self, positions: Tensor, old: Grid, new: Grid, *, prefix: int) -> Tensor:
        if self._interpolation is None:
            raise InputError(
                "the file does not show which code wrote the file, so the algorithm for the position embeddings is not "
                "known; the algorithms give different networks",
                hint=f"add --set interpolation=CODE with the code that trained the model: {', '.join(INTERPOLATIONS)}",
            )
        self.used = True
        return resample_positions(positions, old, new, interpolation=self._interpolation, prefix=prefix)

    def _bias_table(self, path: str, table: Tensor) -> Tensor | None:
        old, new = (_size(getattr(net.get_submodule(path), "window_size", None)) for net in (self._old, self._new))
        return None if old is None or new is None else resample_bias_table(table, old_window=old, new_window=new)


def _patch_grid(owner: nn.Module) -> Grid | None:
    """Return (rows, columns) of the patches whose position embeddings a module adds, or None if not known."""
    embedding = getattr(owner, "patch_embed", None)
    return _size(getattr(embedding, "grid_size", None))


def _size(value: Any) -> Grid | None:
    if isinstance(value, tuple | list) and len(value) == 2 and all(isinstance(side, int) for side in value):
        return value[0], value[1]
    return None


def _words(sides: tuple[int, ...] | torch.Size) -> str:
    return " × ".join(map(str, sides))
