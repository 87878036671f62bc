"""Spec of a naive ViT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gmmvit_deploy.models.specs import PatchSpec, require


@dataclass(frozen=True, slots=True, kw_only=True)
class NaiveViTSpec(PatchSpec):
    """The tutorial's ViT: class token, fixed positions, and separate maps of Q, K and V for each head.

    stored_positions: True if the checkpoint holds the positions, False if the positions are the sinusoids that follow
    from the number of tokens and the width.
    """

    family: ClassVar[str] = "naive_vit"
    stored_positions: bool = False

    def __post_init__(self) -> None:
        PatchSpec.__post_init__(self)
        require(self.dim % self.heads == 0, f"the width {self.dim} is not a multiple of {self.heads} heads")
        require(self.mask.kind == "plain", "a naive ViT has no mask on its attention scores")

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads
