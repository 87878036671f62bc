"""Is RMT's rotation faster as more rows of the projection than as an order of the features of Q and K?

RMT rotates pairs of features of Q and K by the position of the token (rotary position embedding). With the tables cos
and sin, a rotation of x needs a second tensor, in which the features of each pair are swapped:

    exported    x' = x ∘ cos + swapped(x) ∘ sin              x = W s + b, with the even features of each head first, so
                                                             that ``swapped`` moves two halves of a head
    rows        x' = x ∘ cos + (W_rot s + b_rot) ∘ sin       W_rot: the rows of W, swapped within each pair, the first
                                                             row of each pair negated; b_rot alike

s is the input of the projection. In the form *rows*, a single projection has 5 · D rows in place of 3 · D: Q, Q_rot, K,
K_rot and V. Nothing is moved, but the matrix product of the projection has two thirds more multiplications. The script
measures the total time of an RMT in both forms, in each CPU runner with our kernels. The RMT is that of
`fastest_cpu.py`: the preset RMT_T3, smaller.

The script stops if the float64 logits of the forms differ, or if the logits of a program exceed the limits of parity
(`gmmvit_deploy/tolerances.py`). Each program is loaded twice, and every round runs a random copy.

    python benchmarks/rejected/rotation_as_rows.py [--rounds 15] [--check] [--output RESULT]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from benchmarks.shared.two_forms import main
from gmmvit_deploy.families.rmt.attention import ManhattanAttention, PairRotation
from gmmvit_deploy.families.rmt.folding import fold_rotations
from gmmvit_deploy.families.rmt.model import Stage
from gmmvit_deploy.folding.fold import fold, folding_passes
from gmmvit_deploy.layers.attention import SeparateProjections
from gmmvit_deploy.layers.model import Model
from gmmvit_deploy.layers.roles import with_role_of
from gmmvit_deploy.precision import Role


class RotatingProjection(SeparateProjections):
    """A projection to rotated Q, rotated K, and V: (…, D) → three tensors (…, D).

    rows: the linear layer with 5 · D rows.  cos, sin: the tables of all heads, (tokens …, D), which the attentions of a
    stage share.
    """

    operator_roles: ClassVar[Mapping[str, Role]] = {"mul": "rotation", "add": "rotation"}
    cos: Tensor
    sin: Tensor

    def __init__(self, stacked: nn.Linear, cos: Tensor, sin: Tensor, *, head_dim: int) -> None:
        nn.Module.__init__(self)
        width = stacked.in_features
        self.rows = with_role_of(stacked, nn.Linear(width, 5 * width)).requires_grad_(False)
        for ours, trained in ((self.rows.weight, stacked.weight), (self.rows.bias, stacked.bias)):
            query, key, value = trained.chunk(3)
            ours.copy_(torch.cat((query, _turned(query), key, _turned(key), value)))
        heads = width // head_dim
        self.register_buffer("cos", torch.cat([cos] * heads, dim=-1))
        self.register_buffer("sin", torch.cat([sin] * heads, dim=-1))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        query, turned_query, key, turned_key, value = self.rows(x).chunk(5, dim=-1)
        return query * self.cos + turned_query * self.sin, key * self.cos + turned_key * self.sin, value


def _turned(rows: Tensor) -> Tensor:
    """Turn each pair of rows: (r_0, r_1, …) → (−r_1, r_0, …)."""
    return torch.stack((-rows[1::2], rows[::2]), dim=1).flatten(0, 1)


@torch.no_grad()
def rotations_as_rows(model: nn.Module) -> tuple[str, ...]:
    """Replace each projection whose Q and K are rotated by a `RotatingProjection`, in place of `fold_rotations`.

    Returns the names of the changed attentions.
    """
    changed = []
    for name, stage in model.named_modules():
        if not isinstance(stage, Stage) or not isinstance(stage.rotation, PairRotation):
            continue
        (cos, sin), head_dim = stage.rotation.tables(), stage.rotation.angle.numel()
        shared: RotatingProjection | None = None
        for path, attention in stage.named_modules():
            if not isinstance(attention, ManhattanAttention):
                continue
            attention.qkv = RotatingProjection(attention.qkv, cos, sin, head_dim=head_dim)
            if shared is not None:
                attention.qkv.cos, attention.qkv.sin = shared.cos, shared.sin
            shared = attention.qkv
            changed.append(f"{name}.{path}")
        stage.rotation = None
    return tuple(changed)


def folded_as_rows(model: Model) -> Model:
    """Fold an RMT with `rotations_as_rows` in place of `fold_rotations`."""
    passes = [rotations_as_rows if run is fold_rotations else run for run in folding_passes(model.spec)]
    return fold(model, passes).model


if __name__ == "__main__":
    main(__file__, str(__doc__), forms={"rows": folded_as_rows}, systems=("rmt",))
