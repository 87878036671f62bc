"""Find the patch filters and the position embeddings of a model of any family.

    token[d] = Σ filters[d] ∘ patch + bias[d]        x = tokens + positions

The patch embedding is a `PatchEmbedding`, a convolution with the role ``embedding``, or the linear
layer that the class of the model names in ``unfolded_patches``. Modules of other packages declare nothing: their patch
embedding is the first convolution on the channels of the images. If a norm stands before the linear layer, the filters
are the weights of the layer, without the norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.layers.patches import PatchEmbedding, ShiftedPatches, unfolded_filters
from gmmvit_deploy.models.layers.roles import layer_role
from gmmvit_deploy.models.layers.token_grids import UNMARKED_PREFIXES, square_grid

_NAMES = frozenset({"position_embedding", "positions", "pos_embed", "pos_embedding"})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PatchFilters:
    """The filters (D, V · c, rows, columns) of a patch embedding, view after view.

    name: the name of the layer.  views: V, the number of images that the layer reads together: 1, or 5 with SPT.
    """

    name: str
    filters: Tensor
    views: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PositionEmbeddings:
    """Position embeddings (prefix + rows · columns, D), first of the prefix tokens, then of the patches.

    name: the name of the tensor.  grid: (rows, columns).  prefix: the number of prefix tokens, such as a class token.
    stored: False if the network computes the tensor from its sizes, so that no checkpoint stores the tensor.
    """

    name: str
    positions: Tensor
    grid: tuple[int, int]
    prefix: int
    stored: bool


def patch_filters(model: Model) -> PatchFilters | None:
    """Return the filters of the patch embedding, or None for a network without such a layer.

    The patch embedding of a T2T is the linear layer of its first attention: a filter for each feature of Q, K and V.
    """
    if model.unfolded_patches is not None:
        name, side = model.unfolded_patches
        layer = model.get_submodule(name)
        if isinstance(layer, nn.Linear):
            filters = unfolded_filters(layer.weight, side)
            return PatchFilters(name=name, filters=filters, views=filters.shape[1] // model.spec.channels)
    for name, module in model.named_modules():
        if isinstance(module, PatchEmbedding):
            filters, views = module.filters(), module.view_count
        elif isinstance(module, nn.Conv2d) and (model.foreign or layer_role(module) == "embedding"):
            filters, views = module.weight.detach(), 1
        else:
            continue
        if filters.shape[1] == views * model.spec.channels:
            return PatchFilters(name=name, filters=filters, views=views)
    return None


def position_embeddings(model: Model) -> Iterator[PositionEmbeddings]:
    """Yield the position embeddings of prefix tokens and a grid, recognised by the common names of such tensors."""
    # Those that the network computes from its sizes, such as sinusoids, are buffers outside of the state dict.
    stored = model.state_dict()
    for name, tensor in (stored | dict(model.named_buffers())).items():
        if name.rpartition(".")[2] in _NAMES and tensor.dim() == 3 and tensor.shape[0] == 1:
            place = _place(model, tensor.shape[1])
            if place is not None:
                grid, prefix = place
                positions = tensor[0].detach()
                yield PositionEmbeddings(
                    name=name, positions=positions, grid=grid, prefix=prefix, stored=name in stored
                )


def _place(model: Model, tokens: int) -> tuple[tuple[int, int], int] | None:
    """Return ((rows, columns), prefix) with prefix + rows · columns = tokens, or None."""
    network = getattr(model, "network", None)
    size = getattr(getattr(network, "patch_embed", None), "grid_size", None)
    known = getattr(network, "num_prefix_tokens", 0)
    prefixes = (*UNMARKED_PREFIXES, known) if isinstance(known, int) else UNMARKED_PREFIXES
    if isinstance(size, tuple | list) and len(size) == 2 and tokens - math.prod(size) in prefixes:
        return (int(size[0]), int(size[1])), tokens - math.prod(size)
    return square_grid(tokens, prefixes)


@torch.no_grad()
def flatten_channel_first(model: nn.Module) -> bool:
    """Make a model compute what the same weights give on patches that are flattened as (channel, row, column).

    Linear patch embeddings read (row, column, channel), as in vit-pytorch and the code of SPT and LSA; a convolution
    has the other order, so copies of these networks often confuse the two.  Returns True if the model changed.
    """
    changed = False
    for module in model.modules():
        if not isinstance(module, PatchEmbedding):
            continue
        side, values = module.patch_size, module.project.in_features
        norm = getattr(module, "norm" if isinstance(module, ShiftedPatches) else "patch_norm", None)
        if side == 1 or values == side**2:
            continue
        order = torch.arange(values).reshape(-1, side, side).permute(1, 2, 0).flatten()
        for tensor in (module.project.weight, *(() if norm is None else (norm.weight, norm.bias))):
            tensor.copy_(tensor[..., order].clone())
        changed = True
    return changed
