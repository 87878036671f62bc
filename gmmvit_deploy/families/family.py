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
"""Same signature as `gmmvit_deploy.folding.passes.FoldingPass`: (model) → names of the changed parts."""

Mistake = tuple[str, Callable[["Model"], bool]]
"""(mistake in words, a function that applies it to a model and returns whether the model changed)."""

_SMALL_KERNELS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LastBlock:
    """A last `layers.blocks.Block` of which the rest of the network reads only the first token or the mean.

    name: of the module.  reads: the first token, or the mean of all tokens.  tokens: N.
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
    """Record of an architecture.  ``spec`` in the signatures is a spec of this family.

    name:           as used in the spec's JSON, in commands and in reports
    spec:           the class of the spec, a `ModelSpec`
    build:          spec → the module with fresh weights
    sources:        code bases that write checkpoint files of this family
    presets:        name → (classes, image size, mask) → spec; no other family has a preset of the same name
    mask_kinds:     supported kinds of mask
    small:          mask → the spec of a small model, for tests
    blocks:         spec → names of the modules after which parity looks for a drift, in execution order
    last_block:     spec → the last block and the tokens that are read of it, or None if folding must not narrow it
    windows:        spec → name of each attention within windows → its windows; other attentions see all tokens
    folding_passes: additional folding passes, run after the passes on the scores and before the last block is narrowed
    engine_passes:  additional passes for GPU engines, run before heads are padded
    mistakes:       usual mistakes that parity can name, in addition to those of the steps on the scores
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
