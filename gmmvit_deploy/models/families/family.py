"""`Family`: the record of an architecture.  The rest of the package uses an architecture only through this record.

Importing a record does not import torch: its functions import the PyTorch module and the passes when they are called. A
pass is a function that rewrites a trained model for deployment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from gmmvit_deploy.images.resize_rules import ResizeRule
from gmmvit_deploy.models.sources.source import CheckpointSource
from gmmvit_deploy.models.specs import Interpolation, MaskKind, MaskSpec, ModelSpec, PatchSpec

if TYPE_CHECKING:
    from gmmvit_deploy.models.layers.model import Model

OwnPass = Callable[["Model"], tuple[str, ...]]
"""A pass of a family, for folding or for GPU engines: changes a model, and returns the names of the changed modules.

A pass with a numeric proof raises FoldError when the proof fails. The record lists the passes in an order in which
their requirements hold.
"""

Mistake = tuple[str, Callable[["Model"], bool]]
"""A deployment mistake: (description, function that makes the mistake in a model and returns True if it did)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastBlock:
    """The last `layers.blocks.PreNormBlock` of a network whose head reads only the first or the mean of N tokens.

    name: the name of the block's module.
    """

    name: str
    reads: Literal["first", "mean"]
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Division of a lattice of grid × grid tokens into square windows, after a roll up and to the left by ``shift``."""

    grid: int
    window: int
    shift: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The part of a record that needs torch.

    build:          spec → the PyTorch module with random weights
    folding_passes: run after the passes on the attention scores and before `folding.fold.narrow_last_block`
    engine_passes:  run before `folding.engine_forms.pad_heads`
    mistakes:       that ``gmmvit parity`` names, beside those in the steps on the scores
    """

    build: Callable[[Any], Model]
    folding_passes: tuple[OwnPass, ...] = ()
    engine_passes: tuple[OwnPass, ...] = ()
    mistakes: tuple[Mistake, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The record of an architecture.  ``arguments → result`` describes a function, ``spec`` is a spec of this family.

    name:           the name in the spec's JSON, in commands and in reports
    network:        () → `Network`, which imports the PyTorch module and the passes when it is called
    sources:        the code bases that write checkpoint files of this family
    presets:        name → function (classes, image size, mask) → spec; no other family has a preset of the same name
    blocks:         spec → names of the modules whose outputs ``gmmvit parity --localize`` compares, in execution order
    last_block:     spec → `LastBlock`, or None if folding must not change the last block
    windows:        spec → dict: name of an attention → `Windows`; an attention without an entry attends to all tokens
    unavailable:    spec → the reason why this process cannot build the model, such as code in a file that the user did
                    not name; empty if it can
    resized:        (model, (height, width) in pixels, algorithm for position embeddings, or None if not known) →
                    the model for images of this size; None if no rule resizes models of this family
    default_resize: the resize rule if neither the checkpoint nor the user states one; None if the user must state it
    proof:          model → None, a check of a model that was filled from a checkpoint; raises an error
    distributions:  Python packages that define the models, whose versions a bundle records
    """

    name: str
    spec: type[ModelSpec]
    network: Callable[[], Network]
    sources: tuple[CheckpointSource, ...]
    mask_kinds: tuple[MaskKind, ...]
    blocks: Callable[[Any], tuple[str, ...]]
    presets: Mapping[str, Callable[[int, int, MaskSpec], ModelSpec]] = field(default_factory=dict)
    last_block: Callable[[Any], LastBlock | None] = lambda spec: None
    windows: Callable[[Any], Mapping[str, Windows]] = lambda spec: {}
    unavailable: Callable[[Any], str] = lambda spec: ""
    resized: Callable[[Model, tuple[int, int], Interpolation | None], Model] | None = None
    distributions: tuple[str, ...] = ()
    proof: Callable[[Model], None] = lambda model: None
    default_resize: ResizeRule | None = None

    def build(self, spec: Any) -> Model:
        """Return the PyTorch module of a spec, with random weights."""
        return self.network().build(spec)

    @property
    def has_spt_and_lsa(self) -> bool:
        """True if the specs of the family have shifted patch tokenisation and locality self-attention as fields."""
        return {"spt", "lsa"} <= self.spec.__dataclass_fields__.keys()


def plain_blocks(spec: PatchSpec) -> tuple[str, ...]:
    """Return `Family.blocks` of a network of a patch embedding and blocks."""
    return ("patch_embedding", *(f"blocks.{block}" for block in range(spec.depth)))


def stage_blocks(
    depths: tuple[int, ...], *, first: str = "patch_embedding", block: str = "blocks.{}", between: str
) -> tuple[str, ...]:
    """Return `Family.blocks` of a network in stages.  between: what follows a stage but the last."""
    names = [first]
    for stage, depth in enumerate(depths):
        names += [f"stages.{stage}.{block.format(index)}" for index in range(depth)]
        names += [between.format(stage)] if stage < len(depths) - 1 else []
    return tuple(names)


def last_of_blocks(spec: Any, reads: Literal["first", "mean"] = "first") -> LastBlock:
    """Return the last of ``blocks``."""
    return LastBlock(name=f"blocks.{spec.depth - 1}", reads=reads, tokens=spec.tokens)
