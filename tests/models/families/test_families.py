"""Shapes that no golden file has, for the paper's five families: folding keeps their logits."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gmmvit_deploy.models.families import model_from_spec
from gmmvit_deploy.models.families.cait import CaiTSpec
from gmmvit_deploy.models.families.pit import PiTSpec
from gmmvit_deploy.models.families.swin import SwinSpec
from gmmvit_deploy.models.families.t2t import T2TSpec
from gmmvit_deploy.models.families.vit import ViTSpec
from gmmvit_deploy.models.folding.fold import fold
from gmmvit_deploy.models.specs import MaskSpec, ModelSpec
from tests.exact import assert_same_logits, exact_logits

MASKS = [
    MaskSpec(),
    MaskSpec(kind="elm"),
    MaskSpec(kind="gmm", kernels=3),
    MaskSpec(kind="gmm", kernels=2, shared=True),
    MaskSpec(kind="gmm", kernels=2, closed_form=True),
    MaskSpec(kind="gmm", kernels=1, shared=True, closed_form=True),
]


def sizes(draw: st.DrawFn, **largest: int) -> dict[str, int]:
    """Draw a number from 1 to the largest for each name."""
    return {name: draw(st.integers(1, limit)) for name, limit in largest.items()}


@st.composite
def vit_specs(draw: st.DrawFn) -> ViTSpec:
    """Draw any shape that the files allow, small enough for loops; the head dim may differ from dim / heads."""
    mask = draw(st.sampled_from(MASKS))
    patch, grid = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    return ViTSpec(
        image_size=patch * grid,
        patch_size=patch,
        **sizes(draw, classes=7, dim=12, depth=2, heads=3, head_dim=6, mlp_dim=9),
        class_token=mask.kind == "plain" and draw(st.booleans()),
        mask=mask,
    )


@st.composite
def swin_specs(draw: st.DrawFn) -> SwinSpec:
    window, stages = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    patch = draw(st.integers(1, 2))
    windows = draw(st.integers(1, 2))
    heads = draw(st.integers(1, 2))
    return SwinSpec(
        image_size=patch * window * windows * 2 ** (stages - 1),
        patch_size=patch,
        classes=draw(st.integers(1, 4)),
        dim=heads * draw(st.integers(1, 3)),
        depths=tuple(draw(st.integers(1, 2)) for _ in range(stages)),
        heads=tuple(heads for _ in range(stages)),
        window=window,
        mlp_dims=tuple(draw(st.integers(1, 5)) for _ in range(stages)),
        mask=draw(st.sampled_from([mask for mask in MASKS if mask.kind != "elm"])),
    )


@st.composite
def cait_specs(draw: st.DrawFn) -> CaiTSpec:
    patch = draw(st.integers(1, 2))
    return CaiTSpec(
        image_size=patch * draw(st.integers(1, 3)),
        patch_size=patch,
        dim=draw(st.integers(2, 6)),
        **sizes(draw, classes=4, depth=2, class_depth=2, heads=3, head_dim=4, mlp_dim=5),
        mask=draw(st.sampled_from(MASKS)),
    )


@st.composite
def pit_specs(draw: st.DrawFn) -> PiTSpec:
    patch, stages = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    return PiTSpec(
        image_size=patch * draw(st.integers(1, 5)),
        patch_size=patch,
        classes=draw(st.integers(1, 4)),
        dim=draw(st.integers(2, 4)),
        depths=tuple(draw(st.integers(1, 2)) for _ in range(stages)),
        heads=tuple(draw(st.integers(1, 2)) for _ in range(stages)),
        head_dim=draw(st.integers(1, 4)),
        mlp_dims=tuple(draw(st.integers(1, 5)) for _ in range(stages)),
        mask=draw(st.sampled_from(MASKS)),
    )


@st.composite
def t2t_specs(draw: st.DrawFn) -> T2TSpec:
    token_layers = draw(st.integers(1, 2))
    return T2TSpec(
        image_size=2 ** (token_layers + 1) * draw(st.integers(1, 2)),
        dim=draw(st.integers(2, 6)),
        token_layers=token_layers,
        **sizes(draw, classes=4, depth=2, heads=2, head_dim=3, mlp_dim=5, token_dim=4, token_mlp_dim=4),
        mask=draw(st.sampled_from(MASKS)),
    )


LARGER_SWIN = SwinSpec(
    image_size=16,
    patch_size=1,
    classes=3,
    dim=4,
    depths=(2, 2),
    heads=(2, 2),
    window=4,
    mlp_dims=(4, 4),
    mask=MaskSpec(kind="gmm", kernels=2),
)
"""16 windows, shifted in the second block of the first stage."""


@given(spec=st.one_of(vit_specs(), swin_specs(), cait_specs(), pit_specs(), t2t_specs()), seed=st.integers(0, 2**16))
@example(spec=LARGER_SWIN, seed=0)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_folding_keeps_the_logits(spec: ModelSpec, seed: int) -> None:
    torch.manual_seed(seed)
    model = model_from_spec(spec).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))  # so that no bias is 0 and no norm weight is 1
    image = torch.randn(1, 3, spec.image_size, spec.image_size)
    trained, folded = exact_logits(model, image), exact_logits(fold(model.double()).model, image)
    assert_same_logits(folded, trained, atol=1e-11 * max(1.0, float(np.abs(trained).max())))
