"""Usual mistakes in a network of vit-pytorch.  The steps on the attention scores have mistakes of their own.

A mistake in a folded graph, whose head mixing is centred, can give other logits than in the trained network.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from gmmvit_deploy.models.families.family import Mistake
from gmmvit_deploy.models.families.vit_pytorch.folding import centre_head_mixing
from gmmvit_deploy.models.families.vit_pytorch.model import VitPytorch
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.scores.heads import CentredHeadNorm, transpose_mixings


def _other_pooling(model: Model) -> bool:
    if not isinstance(model, VitPytorch) or model.class_token is None:
        return False
    model.pools = "mean" if model.pools == "cls" else "cls"
    return True


def _centred_mixing_transposed(model: Model) -> bool:
    return bool(centre_head_mixing(model)) and transpose_mixings(model, "after")


def _division(deviation: Callable[[CentredHeadNorm, Tensor], Tensor | float]) -> Callable[[Model], bool]:
    """Return a function that divides the centred weights by ``deviation`` in place of their root mean square."""

    def make(model: Model) -> bool:
        class Divided(CentredHeadNorm):
            def forward(self, scores: Tensor) -> Tensor:
                weight, bias = self.matrix()
                out: Tensor = scores / deviation(self, scores) * weight[:, None, None] + bias[:, None, None]
                return out

        centre_head_mixing(model)
        norms = [module for module in model.modules() if isinstance(module, CentredHeadNorm)]
        for norm in norms:
            norm.__class__ = Divided
        return bool(norms)

    return make


def _undivided(norm: CentredHeadNorm, scores: Tensor) -> float:
    return 1.0


def _over_the_keys(norm: CentredHeadNorm, scores: Tensor) -> Tensor:
    return (scores.square().mean(dim=-1, keepdim=True) + norm.eps).sqrt()


MISTAKES: tuple[Mistake, ...] = (
    ("class token and mean of the tokens exchanged in the pooling", _other_pooling),
    ("the head mixing transposed", lambda model: transpose_mixings(model, "after")),
    ("the head mixing transposed after folding has centred the head mixing", _centred_mixing_transposed),
    ("no division by the standard deviation over the heads", _division(_undivided)),
    ("a division by the root mean square over the keys in place of the heads", _division(_over_the_keys)),
)
