from __future__ import annotations

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gmmvit_deploy.models.families.vit.model import ViT
from gmmvit_deploy.models.families.vit.spec import ViTSpec
from gmmvit_deploy.models.folding.fold import fold
from gmmvit_deploy.models.specs import MaskSpec
from tests.exact import exact_logits
from tests.models.families.oracle import logits_of

MASKS = [
    MaskSpec(),
    MaskSpec(kind="elm"),
    MaskSpec(kind="gmm", kernels=3),
    MaskSpec(kind="gmm", kernels=2, shared=True),
    MaskSpec(kind="gmm", kernels=2, closed_form=True),
    MaskSpec(kind="gmm", kernels=1, shared=True, closed_form=True),
]


@st.composite
def small_specs(draw: st.DrawFn) -> ViTSpec:
    """Draw any shape that the files allow, small enough for loops; the head dim may differ from dim / heads."""
    mask = draw(st.sampled_from(MASKS))
    patch, grid = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    return ViTSpec(
        image_size=patch * grid,
        patch_size=patch,
        classes=draw(st.integers(1, 7)),
        dim=draw(st.integers(1, 12)),
        depth=draw(st.integers(1, 2)),
        heads=draw(st.integers(1, 3)),
        head_dim=draw(st.integers(1, 6)),
        mlp_dim=draw(st.integers(1, 9)),
        class_token=mask.kind == "plain" and draw(st.booleans()),
        mask=mask,
    )


@given(spec=small_specs(), seed=st.integers(0, 2**16))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_trained_and_folded_agree_with_the_formulas(spec: ViTSpec, seed: int) -> None:
    torch.manual_seed(seed)
    model = ViT(spec).eval()
    image = torch.randn(1, 3, spec.image_size, spec.image_size)
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    expected = logits_of(spec, state, image[0].numpy())
    trained = exact_logits(model, image)
    folded = exact_logits(fold(model.double()).model, image)
    # Both in float64, so that the limit holds for every network: 2e-14 was the largest seen over 600 specs.
    np.testing.assert_allclose(trained[0], expected, rtol=0, atol=1e-11)
    np.testing.assert_allclose(folded[0], expected, rtol=0, atol=1e-11)
