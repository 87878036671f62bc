"""CaiT: a vision transformer with head mixing, LayerScale, and class blocks after the patch blocks.

scores:        S' = W_preᵀ · (M ∘ (Q Kᵀ · d^(−1/2)))
weights:       A' = W_postᵀ · softmax(S');   out = A' V
patch blocks:  x = x + γ ∘ attention(norm(x));  x = x + γ ∘ mlp(norm(x))
class blocks:  the same formulas for the class token only; K and V are computed from the patch tokens without a norm, in
               vit-pytorch from the normed class token and the patch tokens without a norm

M is the mask (patch blocks only), and d is the head dim. W_pre and W_post are (heads, heads) matrices that mix the
heads. γ is the factor of LayerScale for each feature.

SPT replaces the patch embedding (`layers.patches`). LSA replaces d^(−1/2) by a learned temperature t[h], and in
the patch blocks the scores of the tokens with themselves by −1e-9, before the first head mixing:

scores:        S' = W_preᵀ · ((1 − I) ∘ (t[h] · Q Kᵀ) − 1e-9 · I)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gmmvit_deploy.inference.precision import Role
from gmmvit_deploy.models.families.cait import CaiTSpec
from gmmvit_deploy.models.families.family import Mistake
from gmmvit_deploy.models.layers.attention import heads_of, projected
from gmmvit_deploy.models.layers.blocks import Mlp, layer_norm
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.layers.patches import NormedPatchEmbedding, PatchEmbedding, ShiftedPatches
from gmmvit_deploy.models.layers.roles import with_role
from gmmvit_deploy.models.scores.attention import AttentionScores, attention_scores
from gmmvit_deploy.models.scores.heads import HeadMixing, transpose_mixings
from gmmvit_deploy.models.scores.locality import MaskedDiagonal, ZeroDiagonal, initial_temperature
from gmmvit_deploy.models.scores.masks import mask_from_spec
from gmmvit_deploy.models.scores.scales import Scale
from gmmvit_deploy.models.scores.step import Step

DIAGONAL = -1e-9
"""The score of a token with itself in the patch blocks of a CaiT with LSA.  The released code meant −∞."""
REMAINDER = "remainder"
"""Name of the step that adds `DIAGONAL` to the diagonal, after the step ``diagonal`` has set the diagonal to 0."""


class TalkingHeadsAttention(nn.Module):
    """Attention with head mixing before and after softmax.  Q is computed from ``x``, K and V from ``context``."""

    operator_roles: ClassVar[Mapping[str, Role]] = {"softmax": "softmax", "matmul": "product"}

    key_value: nn.Module
    stacked_projection: ClassVar[tuple[str, int]] = ("key_value", 2)

    def __init__(self, *, dim: int, heads: int, head_dim: int, before: Mapping[str, Step | None]) -> None:
        super().__init__()
        self.heads = heads
        self.query = with_role(nn.Linear(dim, heads * head_dim, bias=False), "projection")
        self.key_value = with_role(nn.Linear(dim, 2 * heads * head_dim, bias=False), "projection")
        self.scores = AttentionScores(
            before={**before, "mixing": HeadMixing(torch.randn(heads, heads))},
            after={"mixing": HeadMixing(torch.randn(heads, heads))},
        )
        self.out = with_role(nn.Linear(heads * head_dim, dim), "projection")

    def forward(self, x: Float[Tensor, "batch i dim"], context: Tensor) -> Float[Tensor, "batch i dim"]:
        query = heads_of(self.query(x), self.heads)
        key, value = (heads_of(part, self.heads) for part in projected(self.key_value, context, 2))
        weights = self.scores.weights(query, key)
        out: Tensor = self.out((weights @ value).transpose(1, 2).flatten(2))
        return out


class ScaledBranch(nn.Module):
    """A pre-norm branch f with LayerScale: γ ∘ f(norm(x), …).

    gamma: γ, the factor for each feature; None after `folding.merge_layer_scale` has merged γ into f.
    attends_to_itself: True if the attention of a class block reads K and V also from the normed class token.
    """

    operator_roles: ClassVar[Mapping[str, Role]] = {"mul": "scale"}

    gamma: nn.Parameter | None

    def __init__(self, dim: int, inner: nn.Module, *, attends_to_itself: bool = False) -> None:
        super().__init__()
        self.attends_to_itself = attends_to_itself
        self.norm = layer_norm(dim)
        self.inner = inner
        self.gamma = nn.Parameter(torch.full((1, 1, dim), 0.1))

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        normed = self.norm(x)
        # Patch blocks attend to the normed input of the block. Class blocks attend to the patch tokens without a norm.
        if context and self.attends_to_itself:
            context = (torch.cat([normed, *context], dim=1),)
        inputs = (normed,) if isinstance(self.inner, Mlp) else (normed, *(context or (normed,)))
        out: Tensor = self.inner(*inputs)
        return out if self.gamma is None else out * self.gamma


class CaiTBlock(nn.Module):
    """A block that adds the output of the attention branch, and then of the mlp branch, to the tokens."""

    operator_roles: ClassVar[Mapping[str, Role]] = {"add": "residual"}

    def __init__(self, spec: CaiTSpec, before: Mapping[str, Step | None]) -> None:
        super().__init__()
        attention = TalkingHeadsAttention(dim=spec.dim, heads=spec.heads, head_dim=spec.head_dim, before=before)
        self.attention = ScaledBranch(spec.dim, attention, attends_to_itself=spec.attends_to_itself)
        self.mlp = ScaledBranch(spec.dim, Mlp(spec.dim, spec.mlp_dim))

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        x = x + self.attention(x, *context)
        out: Tensor = x + self.mlp(x)
        return out


class CaiT(Model):
    """CaiT, plain or with masks on the attention of the patch blocks."""

    operator_roles: ClassVar[Mapping[str, Role]] = {"add": "bias"}

    spec: CaiTSpec

    def __init__(self, spec: CaiTSpec) -> None:
        super().__init__()
        self.spec = spec
        embedding = ShiftedPatches if spec.spt else NormedPatchEmbedding if spec.normed_patches else PatchEmbedding
        self.patch_embedding = embedding(spec.patch_size, spec.dim, channels=spec.channels)
        self.position_embedding = nn.Parameter(0.02 * torch.randn(1, spec.grid**2, spec.dim))
        self.class_token = nn.Parameter(torch.randn(1, 1, spec.dim))
        self.patch_blocks = nn.ModuleList(CaiTBlock(spec, _patch_steps(spec)) for _ in range(spec.depth))
        self.class_blocks = nn.ModuleList(CaiTBlock(spec, _scale(spec)) for _ in range(spec.class_depth))
        self.head_norm = layer_norm(spec.dim)
        self.head = with_role(nn.Linear(spec.dim, spec.classes), "head")

    def logits_and_features(
        self, images: Float[Tensor, "batch channels side side"]
    ) -> tuple[Float[Tensor, "batch classes"], Float[Tensor, "batch dim"]]:
        x = self.patch_embedding(images) + self.position_embedding
        for block in self.patch_blocks:
            x = block(x)
        token = self.class_token.expand(x.shape[0], -1, -1)
        for block in self.class_blocks:
            token = block(token, x)
        features: Tensor = self.head_norm(token[:, 0])
        return self.head(features), features


def _scale(spec: CaiTSpec) -> dict[str, Step | None]:
    if spec.lsa:
        return {"temperature": initial_temperature(spec.heads, spec.head_dim)}
    return {"scale": Scale(spec.head_dim**-0.5)}


def _patch_steps(spec: CaiTSpec) -> dict[str, Step | None]:
    """Return the steps before head mixing in a patch block."""
    tokens = spec.grid**2
    if spec.lsa:
        return {
            **_scale(spec),
            "diagonal": ZeroDiagonal(tokens, heads=spec.heads),
            REMAINDER: MaskedDiagonal(tokens, DIAGONAL),
        }
    return {**_scale(spec), "mask": mask_from_spec(spec.mask, heads=spec.heads, grid=spec.grid)}


def _other_class_blocks(model: Model) -> bool:
    """Exchange the class blocks of vit-pytorch, whose class token attends to itself, with the authors' class blocks."""
    if not isinstance(model, CaiT):
        return False
    for module in model.class_blocks.modules():
        if isinstance(module, ScaledBranch):
            module.attends_to_itself = not module.attends_to_itself
    return True


def _minus_infinity_after_mixing(model: Model) -> bool:
    """Mask the diagonal where LSA sets the scores of the tokens with themselves to −1e-9."""
    changed = False
    for _, scores in attention_scores(model):
        for _, step in scores.steps_before():
            if isinstance(step, ZeroDiagonal):
                scores.before["masked"] = MaskedDiagonal(step.matrix().shape[-1])
                changed = True
    return changed


MISTAKES: tuple[Mistake, ...] = (
    ("the class token added to the keys of the class blocks, or left out of the keys", _other_class_blocks),
    ("head mixing transposed", lambda model: transpose_mixings(model, "before", "after")),
    ("head mixing before softmax transposed", lambda model: transpose_mixings(model, "before")),
    ("head mixing after softmax transposed", lambda model: transpose_mixings(model, "after")),
    ("the diagonal masked by −∞ in place of scores of −1e-9", _minus_infinity_after_mixing),
)
