"""`Family`: the record of an architecture, the interface between its folder and the rest of the package.

Importing a record does not import torch: functions of the record import the module and the passes when called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from gmmvit_deploy.sources.source import CheckpointSource
from gmmvit_deploy.specs import MaskKind, MaskSpec, ModelSpec

if TYPE_CHECKING:
    from gmmvit_deploy.layers.model import Model

__all__ = ["Family", "LastBlock", "Mistake", "OwnPass", "Windows", "no_passes", "small_mask"]

OwnPass = Callable[["Model"], tuple[str, ...]]
"""A folding or engine pass of a family: changes a model in place and returns the names of the changed modules.

Such a pass has the signature of `gmmvit_deploy.folding.passes.FoldingPass`.
"""

Mistake = tuple[str, Callable[["Model"], bool]]
"""(mistake in words, function that makes the mistake in a model and returns True if the model changed)."""

_SMALL_KERNELS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LastBlock:
    """The last `layers.blocks.Block` of a network that reads only the first token or the mean of the block's tokens.

    name: the name of the module.  reads: ``first`` for the first token, ``mean`` for the mean of all tokens.
    tokens: N, the number of tokens.
    """

    name: str
    reads: Literal["first", "mean"]
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Division of a grid × grid lattice of tokens into windows of window × window tokens.

    shift: number of tokens by which the lattice is rolled up and to the left before the division.
    """

    grid: int
    window: int
    shift: int


def no_passes() -> tuple[OwnPass, ...]:
    return ()


def _reads_all(spec: Any) -> LastBlock | None:
    return None


def _no_windows(spec: Any) -> Mapping[str, Windows]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Record of an architecture.

    In the list below, ``arguments → result`` describes a function, and ``spec`` is a spec of this family.

    name:           the name in the spec's JSON, in commands and in reports
    spec:           the class of the family's specs, a subclass of `ModelSpec`
    build:          spec → the PyTorch module with fresh weights
    sources:        the code bases that write checkpoint files of this family
    presets:        name → function (classes, image size, mask) → spec; each name exists in a single family
    mask_kinds:     the supported kinds of mask
    small:          mask → the spec of a small model, for tests
    blocks:         spec → names of the modules whose outputs ``gmmvit parity --localize`` compares, in execution order
    last_block:     spec → the last block and what the network reads of its output, or None if folding must not change
                    the block
    windows:        spec → dict from the name of an attention to its windows; an attention without an entry attends to
                    all tokens
    folding_passes: () → additional folding passes; they run after the passes on the scores and before
                    `folding.last_block.narrow_last_block`
    engine_passes:  () → additional passes for GPU engines; they run before the head dim is padded
    mistakes:       common deployment mistakes that parity can name, in addition to mistakes in the steps on the scores
    """

    name: str
    spec: Callable[..., ModelSpec]
    build: Callable[[Any], Model]
    sources: tuple[CheckpointSource, ...]
    mask_kinds: tuple[MaskKind, ...]
    small: Callable[[MaskSpec], ModelSpec]
    blocks: Callable[[Any], tuple[str, ...]]
    presets: Mapping[str, Callable[[int, int, MaskSpec], ModelSpec]] = field(default_factory=dict)
    last_block: Callable[[Any], LastBlock | None] = _reads_all
    windows: Callable[[Any], Mapping[str, Windows]] = _no_windows
    folding_passes: Callable[[], tuple[OwnPass, ...]] = no_passes
    engine_passes: Callable[[], tuple[OwnPass, ...]] = no_passes
    mistakes: tuple[Mistake, ...] = ()

    def small_specs(self) -> dict[MaskKind, ModelSpec]:
        """Return a small spec for each supported kind of mask."""
        return {kind: self.small(small_mask(kind)) for kind in self.mask_kinds}


def small_mask(kind: MaskKind) -> MaskSpec:
    """Return a mask spec of this kind; a Gaussian mixture has three kernels per head."""
    return MaskSpec(kind=kind, kernels=_SMALL_KERNELS if kind == "gmm" else 0)
