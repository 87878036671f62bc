"""Spec of the networks DeepViT, ViT, SimpleViT and small-data ViT of the library vit-pytorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from gmmvit_deploy.models.sources.hints import POOLS, Pool
from gmmvit_deploy.models.specs import MaskKind, PatchSpec, require, require_counts

AttentionKind = Literal["plain", "reattention", "lsa"]
"""plain: softmax(Q Kᵀ/√d).  reattention: softmax, head mixing, LayerNorm over the heads (DeepViT).  lsa: a learned
temperature for each layer and a masked diagonal (locality self-attention of the small-data ViT)."""
EmbeddingKind = Literal["linear", "normed", "shifted"]
"""linear: a linear layer.  normed: LayerNorm, linear layer, LayerNorm.  shifted: LayerNorm and a linear layer on the
image and four copies that are shifted by a pixel (shifted patch tokenization of the small-data ViT)."""
OutputKind = Literal["bias", "no bias", "absent"]
"""The output projection of the attention: a linear layer with a bias, without a bias, or absent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VitPytorchSpec(PatchSpec):
    """A vision transformer of vit-pytorch on square images cut into square patches.

    class_token: True if a class token precedes the patches.
    stored_positions: True if the file holds the position embeddings, False for sinusoids.
    pool: the head reads the class token (``cls``), or the mean of all tokens, including the class token (``mean``).
    final_norm: True if a norm of all tokens follows the last block.  head_norm: True if a norm follows the pooling.
    """

    family: ClassVar[str] = "vit_pytorch"
    mask_kinds: ClassVar[tuple[MaskKind, ...]] = ("plain",)
    head_dim: int
    attention: AttentionKind
    embedding: EmbeddingKind
    output: OutputKind
    class_token: bool
    stored_positions: bool
    pool: Pool
    final_norm: bool
    head_norm: bool

    def __post_init__(self) -> None:
        PatchSpec.__post_init__(self)
        require_counts(self, "head_dim")
        for name, values in (
            ("attention", get_args(AttentionKind)),
            ("embedding", get_args(EmbeddingKind)),
            ("output", get_args(OutputKind)),
            ("pool", POOLS),
        ):
            value = getattr(self, name)
            require(value in values, f"{name}: expected one of {', '.join(values)}, got {value!r}")
        require(self.class_token or self.pool == "mean", "pool cls: expected a class token, but the model has none")
        require(
            self.output != "absent" or (self.heads == 1 and self.head_dim == self.dim),
            "only attention with a single head of the full width has no output projection",
        )
        require(
            self.stored_positions or (not self.class_token and self.dim % 4 == 0 and self.dim >= 8),
            "sinusoidal positions: expected a width that is a multiple of 4 and at least 8, and no class token, got "
            f"the width {self.dim}{' and a class token' if self.class_token else ''}",
        )

    @property
    def description(self) -> str:
        names: dict[AttentionKind, str] = {"reattention": "DeepViT", "lsa": "small-data ViT"}
        return f"vit-pytorch {names.get(self.attention, 'ViT' if self.stored_positions else 'SimpleViT')}"
