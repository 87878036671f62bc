"""Rewrite the last block so that the block computes only the class token or only the mean of the tokens."""

from __future__ import annotations

import copy

import torch

from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.models.families import family_of
from gmmvit_deploy.models.layers.blocks import PreNormBlock
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.layers.roles import with_role


@torch.no_grad()
def narrow_last_block(model: Model) -> tuple[str, ...]:
    """Rewrite the last block so that the block computes only the output that the rest of the network reads.

    Class token:  (x + mlp(norm(x)))[0]  →  x[0] + mlp(norm(x[0]))
    Mean:         mean(x + W·h + b)  →  mean(x) + W·mean(h) + b

    In the formulas, x is the sum of the block's input and the output of the attention, h = gelu(first linear layer of
    norm(x)), and W and b belong to the second linear layer of the mlp.
    Unchanged: a network without `Family.last_block`, for example because a norm between the block and the mean does not
    commute with the mean.
    The block then outputs a single token, which class-token pooling and mean pooling return unchanged. Returns the name
    of the block.
    Ensures: in float64 the new block outputs the first token, or the mean of the tokens, of the old block, up to
    rounding.
    Errors: FoldError when the outputs differ.
    """
    last = family_of(model.spec).last_block(model.spec)
    if last is None:
        return ()
    name, reads_first, n = last.name, last.reads == "first", last.tokens
    block = model.get_submodule(name)
    if not isinstance(block, PreNormBlock) or block.gives != "tokens":
        return ()
    before = copy.deepcopy(block).double()
    block.gives = "first" if reads_first else "mean"
    if not reads_first:
        with_role(block.mlp[-1], "head")  # the input of this layer is now a row per image
    width = block.attention_norm.normalized_shape[0]
    tokens = torch.randn(2, n, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = before(tokens)
    expected = expected[:, :1] if reads_first else expected.mean(dim=1, keepdim=True)
    narrowed = copy.deepcopy(block).double()(tokens)
    if not torch.allclose(narrowed, expected, rtol=1e-9, atol=1e-12):
        off = float((narrowed - expected).abs().max())
        raise FoldError(
            f"{name}: narrow_last_block changed the {block.gives} of the output tokens by {off:.2e}; expected no change"
        )
    return (name,)
