"""What the rest of the package asks of an architecture: the record that each family's folder defines once.

Importing a record imports no torch: what needs it, the module and the passes, is imported by functions of the record
when they are called.
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
"""As `gmmvit_deploy.folding.passes.FoldingPass`: (model) → names of what it changed."""

Mistake = tuple[str, Callable[["Model"], bool]]
"""(mistake in words, a function that makes it in a model and returns whether it changed anything)."""

_SMALL_KERNELS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LastBlock:
    """A last `layers.blocks.Block` of whose tokens the rest of the network reads one, or the mean.

    name: of the module.  reads: the first token, or the mean of all.  tokens: N.
    """

    name: str
    reads: Literal["first", "mean"]
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """How an attention divides a grid × grid lattice of tokens into windows of window × window tokens.

    shift: tokens by which the lattice is rolled up and to the left before it is divided, in both directions.
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
    """One architecture.  Functions that take ``spec`` take this family's.

    name:           as in the spec's JSON, in commands and in reports
    spec:           the class of the spec, a `ModelSpec`
    build:          spec → the module with fresh weights
    sources:        code bases whose checkpoint files are of this family
    presets:        name → (classes, image size, mask) → spec; no other family has a preset of the same name
    mask_kinds:     the kinds of mask that the family takes
    small:          mask → the spec of a small model, for tests
    blocks:         spec → names of the modules between which parity looks for a drift, in the order in which they run
    last_block:     spec → what is read of the last block, where folding may narrow it to that
    windows:        spec → name of each attention within windows → its windows; other attentions see all tokens
    folding_passes: own passes of folding, run behind the passes on the scores and before the last block is narrowed
    engine_passes:  own passes for GPU engines, run before heads are padded
    mistakes:       usual mistakes beyond those that the steps of its scores know, for parity to name
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
        """A small spec for each kind of mask that the family takes."""
        return {kind: self.small(small_mask(kind)) for kind in self.mask_kinds}


def small_mask(kind: MaskKind) -> MaskSpec:
    """A mask of this kind, a Gaussian mixture with three kernels a head."""
    return MaskSpec(kind=kind, kernels=_SMALL_KERNELS if kind == "gmm" else 0)
