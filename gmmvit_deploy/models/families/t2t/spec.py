"""Spec of a T2T-ViT, and the presets: architectures that the released code of the masks names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from gmmvit_deploy.models.specs import MaskSpec, ModelSpec, require, require_counts, require_no_mask_with


@dataclass(frozen=True, slots=True, kw_only=True)
class T2TSpec(ModelSpec):
    """T2T-ViT: single-head token transformers on overlapping patches, followed by a ViT.

    token_layers: the number of token transformers.
    token_dim, token_mlp_dim: the output width and the mlp width of the token transformers.
    class_token: True if the head reads a class token, False if the head reads the mean of all tokens.
    spt, lsa: True for shifted patch tokenisation, and for locality self-attention, as in the formulas of the model.
    """

    family: ClassVar[str] = "t2t"
    flags: ClassVar[tuple[str, ...]] = ("class_token", "spt", "lsa")
    dim: int
    depth: int
    heads: int
    head_dim: int
    mlp_dim: int
    token_layers: int
    token_dim: int
    token_mlp_dim: int
    class_token: bool = False
    spt: bool = False
    lsa: bool = False

    def __post_init__(self) -> None:
        ModelSpec.__post_init__(self)
        require_counts(
            self, "dim", "depth", "heads", "head_dim", "mlp_dim", "token_layers", "token_dim", "token_mlp_dim"
        )
        require(
            self.image_size % 2 ** (self.token_layers + 1) == 0,
            f"image side {self.image_size}: expected a multiple of {2 ** (self.token_layers + 1)}, "
            f"because the network halves the grid {self.token_layers + 1} times",
        )
        require_no_mask_with(self, "spt", "lsa")
        require(
            self.class_token or not (self.spt or self.lsa),
            "a T2T with SPT or LSA has a class token, which the head reads",
        )
        require(
            not (self.class_token and self.mask.kind != "plain"),
            "a masked T2T has no class token, because the mask covers only the grid of tokens",
        )
        require(
            not (self.class_token and self.heads == 1) or self.head_dim == self.dim,
            f"a T2T with a class token and one head adds V to its input, so head_dim must be dim: expected {self.dim}, "
            f"got {self.head_dim}",
        )

    @property
    def tokens(self) -> int:
        """N: the number of tokens of the ViT."""
        return self.grids[-1] ** 2 + int(self.class_token)

    @property
    def views(self) -> int:
        """The number of channels that the first unfold reads: 5c with the shifted copies of the image, else c."""
        return (5 if self.spt else 1) * self.channels

    @property
    def grids(self) -> tuple[int, ...]:
        """The number of tokens along a side of the grid: for each token transformer, then for the ViT."""
        return tuple(self.image_size >> step for step in range(1, self.token_layers + 2))


def _t2t(classes: int, image_size: int, mask: MaskSpec) -> T2TSpec:
    return T2TSpec(
        image_size=image_size,
        classes=classes,
        dim=256,
        depth=12,
        heads=4,
        head_dim=64,
        mlp_dim=512,
        token_layers=2 if image_size == 64 else 1,
        token_dim=64,
        token_mlp_dim=64,
        mask=mask,
    )


PRESETS: Mapping[str, Callable[[int, int, MaskSpec], T2TSpec]] = {"t2t": _t2t}
