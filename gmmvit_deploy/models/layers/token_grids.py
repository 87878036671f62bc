"""Determine the grid of the tokens of each attention in a network.

    tokens of Q = tokens of K = prefix + rows · columns

An attention that meets this rule can take a mask on the distances between its tokens. Rows and columns are taken from
the network's attributes or from the feature maps of a run without data (`fused_call.dry_run`). If none fits, the grid
is square.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn

from gmmvit_deploy.errors import SpecError
from gmmvit_deploy.models.layers.fused_call import DRY_IMAGES, DryRun, FusedCall, dry_run, use_fused_calls

_Size: TypeAlias = "tuple[int, int]"

_WINDOW_ATTRIBUTES = ("window_size", "partition_size", "ws")  # where timm's modules store the size of a window
UNMARKED_PREFIXES = (0, 1, 2)
"""Numbers of prefix tokens that a network without ``num_prefix_tokens`` may have: a class and a distillation token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The grid of the tokens of an attention.

    module: the path of the attention module in the network.
    prefix: the number of tokens before the grid, for example a class token.
    grid: (rows, columns); the tokens of the grid are numbered row by row.
    unit: how many rows and columns of the feature map lie between neighbours of the grid: (1, 1), except for a dilated
    grid, for example in the grid attention of MaxViT. A mask measures distances in steps of the grid.
    """

    module: str
    prefix: int
    grid: _Size
    heads: int
    unit: tuple[int, int]
    call: FusedCall

    @property
    def tokens(self) -> int:
        """N, the number of tokens with the prefix."""
        return self.prefix + math.prod(self.grid)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A module that cannot take a mask: the path and the class of the module, and the reason."""

    module: str
    class_name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.module or 'the network'} ({self.class_name}): {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenGrids:
    """The attentions of a dry run, in its order: those that can take a mask, and those that cannot.

    poolings: the paths of the attentions of a single token to all tokens. A mask on distances does not apply to them.
    """

    placements: tuple[Placement, ...]
    refusals: tuple[Refusal, ...]
    poolings: tuple[str, ...]


def placements(network: nn.Module, image_shape: tuple[int, int, int]) -> tuple[Placement, ...]:
    """Return the placement of every attention between the tokens of ``network``.

    Errors: SpecError when an attention cannot take a mask, with a reason for each class of attention, and when the
    network has no attention that can take a mask.
    """
    return require_placements(network, token_grids(network, image_shape))


def require_placements(network: nn.Module, grids: TokenGrids) -> tuple[Placement, ...]:
    """Return the placements of a dry run of ``network``.  Errors: as for `placements`."""
    name = type(network).__name__
    if grids.refusals:
        raise SpecError(f"{name} cannot take a mask: {_listed(grids.refusals)}")
    if not grids.placements:
        raise SpecError(
            f"{name}: expected an attention between tokens that calls the fused attention function, got "
            + (
                f"only attention poolings, each with a single query: {', '.join(grids.poolings)}"
                if grids.poolings
                else "no attention"
            )
        )
    return grids.placements


def token_grids(network: nn.Module, image_shape: tuple[int, int, int], *, only_this_shape: bool = False) -> TokenGrids:
    """Run ``network`` once without data, and return the grids and the refusals.  ``network`` does not change.

    only_this_shape: True if all images have this shape, so that a network for images of any size is not refused.
    Errors: SpecError when an attention calls the fused attention function with ``is_causal`` or ``enable_gqa``.
    """
    general = list(_refusals_of_network(network, any_size=not only_this_shape))
    if general:  # without a fixed grid, the grid of the dry run means nothing
        return TokenGrids(placements=(), refusals=tuple(general), poolings=())
    shapes_only = copy.deepcopy(network).to("meta").eval()
    use_fused_calls(shapes_only)
    return _Rule(shapes_only, dry_run(shapes_only, image_shape)).applied()


def unknown_grids(network: nn.Module, reason: str) -> TokenGrids:
    """Return the result for a network that cannot run without data."""
    return TokenGrids(placements=(), refusals=(_refusal("", network, reason),), poolings=())


def _refusal(path: str, owner: nn.Module, reason: str) -> Refusal:
    return Refusal(module=path, class_name=type(owner).__name__, reason=reason)


def _listed(refusals: tuple[Refusal, ...]) -> str:
    classes: dict[str, list[Refusal]] = {}
    for refusal in refusals:
        classes.setdefault(refusal.class_name, []).append(refusal)
    return "; ".join(
        f"{refused[0]}" + (f" (and {len(refused) - 1} more attentions of this class)" if len(refused) > 1 else "")
        for refused in classes.values()
    )


def _refusals_of_network(network: nn.Module, *, any_size: bool) -> Iterator[Refusal]:
    if "patch_coord" in inspect.signature(network.forward).parameters:
        yield _refusal("", network, "takes images of any grid (NaFlex), so the grid of the tokens is not fixed")
    if any_size and getattr(network, "dynamic_img_size", False):
        reason = "takes images of any size; create the model with dynamic_img_size=False (Swin: strict_img_size=True)"
        yield _refusal("", network, reason)
    for path, module in network.named_modules():
        if any_size and getattr(module, "dynamic_img_pad", False):
            yield _refusal(path, module, "pads images of any size; create the model with dynamic_img_pad=False")
        if "patch_drop" in path.rpartition(".")[2] and getattr(module, "prob", 0) > 0:
            reason = (
                "training drops patches, so tokens are missing from the grid; create the model with patch_drop_rate=0"
            )
            yield _refusal(path, module, reason)
        if isinstance(module, nn.MultiheadAttention):
            reason = "calls the fused attention function inside PyTorch, where gmmvit cannot replace the call"
            yield _refusal(path, module, reason)


class _Rule:
    def __init__(self, network: nn.Module, run: DryRun) -> None:
        self.network, self.run = network, run
        # A network with class attention (CaiT) counts the class token as prefix, and adds this token after the patches.
        known = getattr(network, "num_prefix_tokens", None)
        self.prefixes: tuple[int, ...] = UNMARKED_PREFIXES if known is None else tuple(dict.fromkeys((known, 0)))

    def applied(self) -> TokenGrids:
        places: list[Placement] = []
        refusals: list[Refusal] = []
        poolings: list[str] = []
        for call in self.run.calls:
            outcome = self._outcome(call)
            if outcome is None:
                poolings.append(call.module)
            elif isinstance(outcome, Placement):
                places.append(outcome)
            else:
                refusals.append(_refusal(call.module, self.network.get_submodule(call.module), outcome))
        answered = {call.module for call in self.run.calls}
        rows: dict[str, int] = {}
        for path, shape in self.run.softmaxes:
            owner = self._owner(path)
            if owner not in answered and len(shape) >= 3:
                rows[owner] = max(shape[-2], rows.get(owner, 1))
        for owner, count in rows.items():
            if count == 1:
                poolings.append(owner)
            else:
                reason = "computes the attention weights without the fused attention function"
                refusals.append(_refusal(owner, self.network.get_submodule(owner), reason))
        return TokenGrids(placements=tuple(places), refusals=tuple(refusals), poolings=tuple(poolings))

    def _owner(self, path: str) -> str:
        """Return the path of the attention that computes a softmax; the softmax itself may be a submodule."""
        if isinstance(self.network.get_submodule(path), nn.Softmax):
            return path.rpartition(".")[0]
        return path

    def _outcome(self, call: FusedCall) -> Placement | str | None:
        """Return a placement, the reason for a refusal, or None for a pooling: a single query for each head."""
        if len(call.query) != 4:
            return f"expected Q of the shape (batch, heads, tokens, head dim), got {len(call.query)} dimensions"
        tokens, key_tokens = call.query[2], call.key[2]
        if tokens == 1 and key_tokens > 1:
            return None
        if tokens != key_tokens:
            return f"expected the same tokens for Q and K, got {tokens} tokens for Q and {key_tokens} tokens for K"
        times = sum(other.module == call.module for other in self.run.calls)
        if times > 1:
            return f"calls the fused attention function {times} times in a forward pass; expected one call"
        if self._over_channels(call):
            return "computes scores between channels, not between tokens"
        sides = self._grid(call.module, tokens)
        if sides is None:
            prefixes = " or ".join(map(str, sorted(self.prefixes)))
            return f"expected {prefixes} prefix tokens and the tokens of a known or square grid, got {tokens} tokens"
        grid, prefix = sides
        unit = self._unit(call, grid)
        return Placement(module=call.module, prefix=prefix, grid=grid, heads=call.query[1], unit=unit, call=call)

    def _over_channels(self, call: FusedCall) -> bool:
        """Return True if the rows of Q are channels: the last dimension of Q then counts the tokens of the input."""
        shape = self.run.inputs.get(call.module)
        if shape is None or len(shape) != 3 or call.query[3] != shape[1]:
            return False
        # A head dim may equal the number of tokens by chance; attention over channels then has a learned temperature.
        return call.query[2] != shape[1] or hasattr(self.network.get_submodule(call.module), "temperature")

    def _grid(self, path: str, tokens: int) -> tuple[_Size, int] | None:
        """Return ((rows, columns), prefix) with prefix + rows · columns = tokens."""
        for grid in self._candidates(path):
            prefix = tokens - math.prod(grid)
            if prefix in self.prefixes:
                return grid, prefix
        return square_grid(tokens, self.prefixes)

    def _candidates(self, path: str) -> Iterator[_Size]:
        """Yield sizes of a grid: of windows, of the patches, of feature maps."""
        for _, owner in self._owners(path):
            for name in _WINDOW_ATTRIBUTES:
                size = _size(getattr(owner, name, None))
                if size is not None:
                    yield size
        embedding = getattr(self.network, "patch_embed", None)
        size = _size(getattr(embedding, "grid_size", None))
        if size is not None:
            yield size
        yield from self.run.maps

    def _owners(self, path: str) -> Iterator[tuple[str, nn.Module]]:
        """Yield (path, module) of an attention and of the modules that hold it, the network excluded."""
        while path:
            yield path, self.network.get_submodule(path)
            path = path.rpartition(".")[0]

    def _unit(self, call: FusedCall, grid: _Size) -> _Size:
        """Return `Placement.unit`.  The other positions of a dilated grid are further grids, as rows of the batch."""
        for path, owner in self._owners(call.module):
            parallel = call.module == f"{path}.attn_grid"  # MaxViT's block with a window beside a dilated grid
            dilated = hasattr(owner, "partition_size") and not getattr(owner, "partition_block", not parallel)
            spread = hasattr(owner, "patch_area")  # MobileViT: attention between equal positions of all patches
            if not (dilated or spread):
                continue
            shape = self.run.inputs[path]
            grids = call.query[0] // DRY_IMAGES
            for height, width in ((shape[1], shape[2]), (shape[2], shape[3])):  # channels last, channels first
                if height * width == grids * grid[0] * grid[1]:
                    return height // grid[0], width // grid[1]
        return 1, 1


def square_grid(tokens: int, prefixes: Iterable[int]) -> tuple[_Size, int] | None:
    """Return ((side, side), prefix) with prefix + side² = tokens, for the first prefix that fits, or None."""
    for prefix in prefixes:
        side = math.isqrt(max(tokens - prefix, 0))
        if side > 0 and side**2 + prefix == tokens:
            return (side, side), prefix
    return None


def _size(value: Any) -> _Size | None:
    """Return an attribute as (rows, columns), or None if the attribute is no size."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = (value, value)
    if (
        isinstance(value, tuple | list)
        and len(value) == 2
        and all(isinstance(side, int) and side > 0 for side in value)
    ):
        return value[0], value[1]
    return None
