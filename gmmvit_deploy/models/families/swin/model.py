"""Swin: attention within windows that shift in every other block.

block:           x = x + attention(norm(x)), separately within each w×w window;  x = x + mlp(norm(x))
scores:          M ∘ (Q Kᵀ · d^(−1/2)) + relative position bias + shift mask
between stages:  each 2×2 group of neighbouring tokens is concatenated (width 4D), normed and projected to width 2D
logits = head(mean over tokens of norm(x))

M is the Gaussian mixture mask of a window, d is the head dim, and D is the width of the stage. The shift mask is −100
for two tokens that are in the same window only because of the shift, otherwise 0.

SPT replaces the patch convolution and its norm, and the norm and projection between stages (`layers.patches`).
LSA replaces d^(−1/2) by a learned temperature of each head, and masks the diagonal of the scores after the biases.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.inference.precision import Role
from gmmvit_deploy.models.families.swin import SwinSpec
from gmmvit_deploy.models.layers.attention import MaskedAttention
from gmmvit_deploy.models.layers.blocks import Mlp, layer_norm
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.layers.patches import ShiftedMerging, image_patches
from gmmvit_deploy.models.layers.roles import with_role
from gmmvit_deploy.models.scores.attention import AttentionScores, scaled_scores
from gmmvit_deploy.models.scores.biases import WindowBias, relative_position_index, shift_mask
from gmmvit_deploy.models.scores.locality import locality_scores
from gmmvit_deploy.models.scores.masks import mask_from_spec
from gmmvit_deploy.models.specs import MEAN_OF_TOKENS


class WindowBlock(nn.Module):
    """A pre-norm block on a grid × grid lattice of tokens.  Each token attends only to the tokens of its window.

    Transposes divide the lattice into windows. With a shift, a single gather shifts and divides it, and another gather
    undoes both: a runtime copies the tokens once, where a roll would copy them twice more.
    in_windows, in_rows: the indices of these gathers, (grid²,); empty without a shift.
    """

    operator_roles: ClassVar[Mapping[str, Role]] = {"add": "residual"}
    in_windows: Int[Tensor, " places"]
    in_rows: Int[Tensor, " places"]

    def __init__(self, spec: SwinSpec, *, stage: int, block: int) -> None:
        super().__init__()
        self.grid, self.window, self.shift = spec.grids[stage], spec.window, spec.shift(stage, block)
        self.joined = False  # True after `join_windows`, which moves windows into batch or heads
        order = shifted_windows(self.grid, self.window, self.shift) if self.shift else torch.empty(0, dtype=torch.int64)
        self.register_buffer("in_windows", order, persistent=False)
        self.register_buffer("in_rows", order.argsort(), persistent=False)
        dim, heads = spec.dims[stage], spec.heads[stage]
        self.attention_norm = layer_norm(dim)
        self.attention = MaskedAttention(
            dim=dim,
            heads=heads,
            head_dim=dim // heads,
            scores=self._scores(spec, heads=heads, head_dim=dim // heads),
            qkv_bias=True,
        )
        self.mlp_norm = layer_norm(dim)
        self.mlp = Mlp(dim, spec.mlp_dims[stage])

    def _scores(self, spec: SwinSpec, *, heads: int, head_dim: int) -> AttentionScores:
        outside = shift_mask(self.grid, self.window, self.shift) if self.shift else None
        table = 0.02 * torch.randn((2 * self.window - 1) ** 2, heads)
        bias = WindowBias(table, relative_position_index(self.window), outside)
        if spec.lsa:
            return locality_scores(heads=heads, head_dim=head_dim, tokens=self.window**2, bias=bias, scales_query=True)
        mask = mask_from_spec(spec.mask, heads=heads, grid=self.window)
        return scaled_scores(head_dim**-0.5, mask=mask, bias=bias, scales_query=True)

    def forward(self, x: Float[Tensor, "batch n dim"]) -> Float[Tensor, "batch n dim"]:
        x = x + self._attended(self.attention_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out

    def _attended(self, x: Float[Tensor, "batch n dim"]) -> Float[Tensor, "batch n dim"]:
        dim, side = x.shape[-1], self.grid // self.window
        if self.shift:
            windows = x.index_select(1, self.in_windows)
        else:
            windows = x.reshape(-1, side, self.window, side, self.window, dim).transpose(2, 3)
        alone = self.joined and self.attention.windows is None
        shape = (-1, self.window**2, dim) if alone else (-1, side**2, self.window**2, dim)
        mixed: Tensor = self.attention(windows.reshape(shape))
        if self.shift:
            return mixed.reshape(-1, self.grid**2, dim).index_select(1, self.in_rows)
        return (
            mixed.reshape(-1, side, side, self.window, self.window, dim).transpose(2, 3).reshape(-1, self.grid**2, dim)
        )


def shifted_windows(grid: int, window: int, shift: int) -> Int[Tensor, " places"]:
    """Return the token at each place of the windows, in the order (window, row, column), after a shift up and left."""
    tokens = torch.arange(grid**2).reshape(grid, grid).roll((-shift, -shift), dims=(0, 1))
    side = grid // window
    return tokens.reshape(side, window, side, window).transpose(1, 2).flatten()


class PatchMerging(nn.Module):
    """Concatenate each 2×2 group of tokens, then apply LayerNorm (width 4D) and a linear layer to width 2D.

    The order in a group is (even row, even column), (odd, even), (even, odd), (odd, odd).
    """

    def __init__(self, grid: int, dim: int) -> None:
        super().__init__()
        self.grid = grid
        self.norm = layer_norm(4 * dim)
        self.reduce = with_role(nn.Linear(4 * dim, 2 * dim, bias=False), "projection")

    def forward(self, x: Float[Tensor, "batch n dim"]) -> Float[Tensor, "batch quarter twice"]:
        half, dim = self.grid // 2, x.shape[-1]
        # (B, half, row parity, half, column parity, D) → the column parity comes before the row parity
        quads = x.reshape(-1, half, 2, half, 2, dim).permute(0, 1, 3, 4, 2, 5)
        merged: Tensor = self.reduce(self.norm(quads.reshape(-1, half**2, 4 * dim)))
        return merged


class Stage(nn.Module):
    """Blocks on the same grid of tokens, then patch merging unless the stage is the last stage."""

    def __init__(self, spec: SwinSpec, stage: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(WindowBlock(spec, stage=stage, block=block) for block in range(spec.depths[stage]))
        last = stage == len(spec.depths) - 1
        merging = ShiftedMerging if spec.spt else PatchMerging
        self.merge = None if last else merging(spec.grids[stage], spec.dims[stage])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x if self.merge is None else self.merge(x)


class Swin(Model):
    """Swin transformer, plain or with a Gaussian mixture mask on the attention within each window."""

    operator_roles: ClassVar[Mapping[str, Role]] = {"add": "bias", "mean": "pooling"}

    spec: SwinSpec

    def __init__(self, spec: SwinSpec) -> None:
        super().__init__()
        self.spec = spec
        self.patch_embedding = image_patches(spec)
        self.patch_norm = None if spec.spt else layer_norm(spec.dim)
        self.position_embedding = nn.Parameter(0.02 * torch.randn(1, spec.grids[0] ** 2, spec.dim))
        self.stages = nn.ModuleList(Stage(spec, stage) for stage in range(len(spec.depths)))
        self.norm = layer_norm(spec.dims[-1])
        self.head = with_role(nn.Linear(spec.dims[-1], spec.classes), "head")

    @property
    def pooling(self) -> str:
        return MEAN_OF_TOKENS

    def logits_and_features(
        self, images: Float[Tensor, "batch channels side side"]
    ) -> tuple[Float[Tensor, "batch classes"], Float[Tensor, "batch dim"]]:
        x = self.patch_embedding(images)
        if self.patch_norm is not None:
            x = self.patch_norm(x.flatten(2).transpose(1, 2))
        x = x + self.position_embedding
        for stage in self.stages:
            x = stage(x)
        features: Tensor = self.norm(x).mean(dim=1)
        return self.head(features), features


@torch.no_grad()
def join_windows(model: nn.Module) -> tuple[str, ...]:
    """Move the dimension of the W windows into that of the batch or of the H heads: fused kernels need four dimensions.

    Scores (B, W, H, n, n)  →  (B·W, H, n, n), or (B, W·H, n, n) if a step on the scores differs between windows.

    Requires: every step on the scores is folded.
    Ensures: the same products and sums in the same order. If windows become heads, each constant is repeated for each
    window, so that no constant is broadcast over windows; head h of window w gets the index w·H + h.
    """
    changed = []
    for name, block in model.named_modules():
        if not isinstance(block, WindowBlock) or block.joined:
            continue
        scores = block.attention.scores
        steps = list(scores.steps())
        if not all(step.is_constant for _, step in steps):
            raise FoldError(
                f"{name}: run fold_masks and fold_biases before join_windows, which needs constant masks and biases"
            )
        by_window = [matrix.shape[0] for _, step in steps if (matrix := step.matrix()).dim() == 4]
        if by_window:
            for step_name, step in steps:
                scores.put(step_name, step.for_windows(by_window[0], block.attention.heads))
            block.attention.windows = by_window[0]
        block.joined = True
        changed.append(name)
    return tuple(changed)
